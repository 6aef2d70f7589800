// Length of the union of intervals: how long at least one operation was running.
//
// Thread safety: any thread.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "base/mutex.h"

namespace bagua {

class BusyClock {
 public:
  void start(int64_t now) {
    const Lock lock(mutex_);
    if (running_++ == 0) since_ = std::max(now, since_);
  }

  void stop(int64_t now, std::atomic<uint64_t>* total) {
    const Lock lock(mutex_);
    if (--running_ > 0 || now <= since_) return;
    total->fetch_add(static_cast<uint64_t>(now - since_), std::memory_order_relaxed);
    since_ = now;
  }

 private:
  Mutex mutex_;
  int running_ GUARDED_BY(mutex_) = 0;
  int64_t since_ GUARDED_BY(mutex_) = 0;
};

}  // namespace bagua
