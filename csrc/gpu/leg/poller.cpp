#include "gpu/leg/poller.h"

#include <chrono>

#include "base/clock.h"

namespace bagua::device {

namespace {
constexpr std::chrono::seconds kLongest{10};
constexpr int64_t kHangs = kNsPerS;
}  // namespace

uint64_t Poller::add(std::function<void()> look) {
  const Lock lock(mutex_);
  looks_[next_] = std::move(look);
  return next_++;
}

bool Poller::remove(uint64_t id) {
  Lock lock(mutex_);
  if (!back_.wait_for(lock, kLongest, [&]() REQUIRES(mutex_) { return at_ != id; })) return false;
  looks_.erase(id);
  return true;
}

void Poller::poll() {
  Lock lock(mutex_);
  for (auto it = looks_.begin(); it != looks_.end();) {
    const uint64_t id = at_ = it->first;
    since_ns_ = now_ns();
    const std::function<void()>& look = it->second;  // remove() does not erase it while it runs
    lock.unlock();
    look();
    lock.lock();
    at_ = 0;
    back_.notify_all();
    it = looks_.upper_bound(id);
  }
}

int64_t Poller::hanging_since() {
  const Lock lock(mutex_);
  return at_ != 0 && now_ns() > since_ns_ + kHangs ? since_ns_ : 0;
}

}  // namespace bagua::device
