#include "gpu/leg/departures.h"

#include <algorithm>

#include "gpu/leg/lane.h"

namespace bagua::device {

void Departures::depart(Operation* operation) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (away_ == kMost) {
    queue_.push_back(operation);
    return;
  }
  ++away_;
  operation->lane->leave(operation);
}

void Departures::back() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (queue_.empty()) {
    --away_;
    return;
  }
  Operation* const next = queue_.front();
  queue_.pop_front();
  next->lane->leave(next);
}

void Departures::forget(const Lane* lane) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto theirs = [lane](const Operation* operation) { return operation->lane == lane; };
  queue_.erase(std::remove_if(queue_.begin(), queue_.end(), theirs), queue_.end());
}

}  // namespace bagua::device
