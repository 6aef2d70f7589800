// FIFO of operations enqueued to NCCL.
//
// An operation is in it from its enqueuing until the device has done it.
//
// Thread safety: any thread.
#pragma once

#include <deque>
#include <string>

#include "base/mutex.h"
#include "gpu/leg/operation.h"
#include "gpu/leg/operation_table.h"
#include "gpu/leg/runtime.h"

namespace bagua::device {

class OperationsInFlight {
 public:
  // `members`: ranks of the communicator, for messages.
  OperationsInFlight(Runtime* runtime, OperationTable* table, std::string members);
  ~OperationsInFlight();
  OperationsInFlight(const OperationsInFlight&) = delete;
  OperationsInFlight& operator=(const OperationsInFlight&) = delete;

  // It is about to be enqueued. Gives it Operation::begun, to be recorded before NCCL's work.
  Status begin(Operation* operation);
  // All of it has been enqueued: it is retired when it is over; at once where that has failed.
  void enqueued(Operation* operation, bool ok);
  // Retires everything: the device has done it, or the leg has failed. False: see Poller::remove; nothing is retired.
  bool clear();

 private:
  struct Entry {
    Operation* operation;
    bool enqueued;
    int64_t begun_ns;  // when its beginning was seen; 0: not yet
  };
  void settle();
  bool first(Entry* out);
  Waiting look();

  Runtime* const runtime_;
  OperationTable* const table_;
  const std::string members_;

  Mutex settling_;  // one thread settles; held across CUDA calls
  Mutex mutex_;     // guards the next one; never held across a CUDA call: `waiting` locks it
  std::deque<Entry> queue_ GUARDED_BY(mutex_);

  uint64_t wait_id_ = 0, poll_id_ = 0;  // constant until clear()
};

}  // namespace bagua::device
