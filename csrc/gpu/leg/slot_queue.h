// Queues operations while all daemon slots are in use.
//
// The channel has kSlots for this rank's operations; staged operations take kMost of them. Further ones leave in their
// order as slots become free.
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
  // Submits the operation to the daemon now, or from free_one().
  void enter(Operation* operation);
  // An operation at the daemon has ended: its slot goes to the first of the queue.
  void free_one();
  // Drops the queued operations of one route.
  void forget(const StagedRoute* staged);

 private:
  static constexpr uint32_t kMost = kSlots * 3 / 4;  // the others are for operations on the host's memory

  Mutex mutex_;  // held while operations leave, so that they do in their order
  uint32_t taken_ GUARDED_BY(mutex_) = 0;
  std::deque<Operation*> queue_ GUARDED_BY(mutex_);
};

}  // namespace bagua::device
