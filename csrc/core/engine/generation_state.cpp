#include "engine/generation_state.h"

namespace bagua {

bool GenerationState::set_error(const std::string& reason, bool ended) {
  const Lock lock(mutex_);
  if (failed_.load(std::memory_order_relaxed)) return false;
  error_ = reason;
  job_->page().show_error(reason);
  ended_.store(ended, std::memory_order_relaxed);
  failed_.store(true, std::memory_order_release);
  return true;
}

bool GenerationState::fail(const std::string& reason) {
  if (!set_error(reason, false)) return false;
  job_->events().tell("error", -1, reason);
  job_->page().ring_doorbell();
  return true;
}

void GenerationState::end(const std::string& reason) {
  if (set_error(reason, true)) job_->page().ring_doorbell();
}

std::string GenerationState::error() const {
  const Lock lock(mutex_);
  return error_;
}

void GenerationState::set_ring(std::vector<int> order) {
  const Lock lock(mutex_);
  if (ring_.empty()) ring_ = std::move(order);
}

std::vector<int> GenerationState::ring() const {
  const Lock lock(mutex_);
  return ring_;
}

}  // namespace bagua
