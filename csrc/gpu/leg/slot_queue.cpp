#include "gpu/leg/slot_queue.h"

#include <algorithm>

#include "gpu/leg/staged_route.h"

namespace bagua::device {

void SlotQueue::enter(Operation* operation) {
  const Lock lock(mutex_);
  if (taken_ == kMost) {
    queue_.push_back(operation);
    return;
  }
  ++taken_;
  operation->staged->submit_to_daemon(operation);
}

void SlotQueue::free_one() {
  const Lock lock(mutex_);
  if (queue_.empty()) {
    --taken_;
    return;
  }
  Operation* const next = queue_.front();
  queue_.pop_front();
  next->staged->submit_to_daemon(next);
}

void SlotQueue::forget(const StagedRoute* staged) {
  const Lock lock(mutex_);
  const auto theirs = [staged](const Operation* operation) { return operation->staged == staged; };
  queue_.erase(std::remove_if(queue_.begin(), queue_.end(), theirs), queue_.end());
}

}  // namespace bagua::device
