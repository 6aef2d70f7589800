// Length of the union of intervals: how long at least one operation was running.
//
// Thread safety: any thread; mutex_ guards all members.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>

namespace bagua {

class BusyClock {
 public:
  void start(int64_t now) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (running_++ == 0) since_ = std::max(now, since_);
  }

  void stop(int64_t now, std::atomic<uint64_t>* total) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (--running_ > 0 || now <= since_) return;
    total->fetch_add(static_cast<uint64_t>(now - since_), std::memory_order_relaxed);
    since_ = now;
  }

 private:
  std::mutex mutex_;
  int running_ = 0;
  int64_t since_ = 0;
};

}  // namespace bagua
