// Queues operations while all daemon slots are in use.
//
// The channel has kSlots slots for this rank's operations. Staged operations use at most kMost of them. Others wait
// here and are submitted in order when slots become free.
//
// Thread safety: any thread. Calls no CUDA.
#pragma once

#include <deque>

#include "base/mutex.h"
#include "channel/layout.h"

namespace bagua::device {

struct Operation;
class StagedRoute;

class SlotQueue {
 public:
  // Submits the operation to the daemon now, or later from free_one().
  void enter(Operation* operation);
  // An operation of the daemon has ended: gives its slot to the first operation of the queue.
  void free_one();
  // Drops the queued operations of one route.
  void forget(const StagedRoute* staged);

 private:
  static constexpr uint32_t kMost = kSlots * 3 / 4;  // the rest is for operations on host memory

  Mutex mutex_;  // held while operations are submitted, to keep their order
  uint32_t taken_ GUARDED_BY(mutex_) = 0;
  std::deque<Operation*> queue_ GUARDED_BY(mutex_);
};

}  // namespace bagua::device
