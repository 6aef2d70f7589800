// Asks an executor's thread which operations wait for other hosts.
//
// Thread safety: ask() from any thread; the rest from the executor's thread.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <utility>

#include "base/mutex.h"

namespace bagua {

class Inquiry {
 public:
  // Returns the answer about operations that have waited since before `before_ns`; empty if none comes within 200 ms.
  // `wake` makes the executor's thread look.
  template <class Wake>
  std::string ask(int64_t before_ns, const Wake& wake) {
    Lock lock(mutex_);
    if (closed_) return "";
    before_ns_ = before_ns;
    pending_.store(true, std::memory_order_release);
    wake();
    changed_.wait_for(lock, std::chrono::milliseconds(200),
                      [this]() REQUIRES(mutex_) { return !pending_.load() || closed_; });
    return pending_.load() || closed_ ? "" : answer_;
  }

  bool pending() const { return pending_.load(std::memory_order_acquire); }
  // `describe(before_ns)` returns the answer.
  template <class Describe>
  void answer(const Describe& describe) {
    {
      const Lock lock(mutex_);
      answer_ = describe(before_ns_);
      pending_.store(false, std::memory_order_release);
    }
    changed_.notify_all();
  }
  // Nobody answers any more.
  void close() {
    {
      const Lock lock(mutex_);
      closed_ = true;
    }
    changed_.notify_all();
  }

 private:
  Mutex mutex_;
  Condition changed_;
  std::atomic<bool> pending_{false};  // set under mutex_
  bool closed_ GUARDED_BY(mutex_) = false;
  int64_t before_ns_ GUARDED_BY(mutex_) = 0;
  std::string answer_ GUARDED_BY(mutex_);
};

}  // namespace bagua
