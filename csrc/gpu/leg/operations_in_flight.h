// FIFO of operations enqueued to NCCL.
//
// An operation is in the FIFO from the moment it is enqueued until the device has done it.
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

  // Call it before enqueuing. Creates Operation::begun, which must be recorded before NCCL's work.
  Status begin(Operation* operation);
  // Call it after enqueuing: the operation is retired when it has ended, or at once if enqueuing has failed.
  void enqueued(Operation* operation, bool ok);
  // Retires all operations; the device must have done them, or the leg have failed. False: see Poller::remove; then
  // nothing is retired.
  bool clear();

 private:
  struct Entry {
    Operation* operation;
    bool enqueued;
    int64_t begun_ns;  // when its beginning was first seen; 0: not yet
  };
  void settle();
  bool first(Entry* out);
  Waiting look();

  Runtime* const runtime_;
  OperationTable* const table_;
  const std::string members_;

  Mutex settling_;  // one thread at a time settles; held across CUDA calls
  Mutex mutex_;     // guards the next one; never held across a CUDA call: `waiting` locks it
  std::deque<Entry> queue_ GUARDED_BY(mutex_);

  uint64_t wait_id_ = 0, poll_id_ = 0;  // constant until clear()
};

}  // namespace bagua::device
