// Operations of a communicator that NCCL carries, in their order: from their enqueuing until the device has done them.
//
// Thread safety: any thread.
#pragma once

#include <deque>
#include <mutex>
#include <string>

#include "gpu/leg/operation.h"
#include "gpu/leg/runtime.h"
#include "gpu/leg/table.h"

namespace bagua::device {

class Carried {
 public:
  // `members`: who takes part, for people.
  Carried(Runtime* runtime, OperationTable* table, std::string members);
  ~Carried();
  Carried(const Carried&) = delete;
  Carried& operator=(const Carried&) = delete;

  // It is about to be enqueued. Gives it Operation::begun, to be recorded before NCCL's work.
  Status begin(Operation* operation);
  // All of it has been enqueued: it is retired when it is over; at once where that has failed.
  void enqueued(Operation* operation, bool ok);
  // Retires everything: the device has done it, or the leg has failed. False: see Rounds::remove; nothing is retired.
  bool clear();

 private:
  struct Entry {
    Operation* operation;
    bool enqueued;
    int64_t begun_ns;  // when it was seen that it had begun; 0: not yet
  };
  void settle();
  bool first(Entry* out);
  Waiting look();

  Runtime* const runtime_;
  OperationTable* const table_;
  const std::string members_;

  std::mutex settling_;  // one thread settles; held while CUDA is asked
  std::mutex mutex_;     // guards the next one; never held while CUDA is asked, as Patience must not wait for that
  std::deque<Entry> queue_;

  uint64_t waits_ = 0, round_ = 0;  // constant until clear()
};

}  // namespace bagua::device
