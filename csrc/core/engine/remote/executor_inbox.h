// Queue from other threads to an executor's thread: operations, receives that seek a source, ranks that have left, the
// request to close, and the question which operations wait for other hosts.
//
// Thread safety: any thread; take(), close(), answer() and await() belong to the executor's thread. mutex_ guards all
// members but the atomic ones.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/mutex.h"
#include "engine/local/communicator.h"
#include "engine/local/operation.h"

namespace bagua {

class ExecutorInbox {
 public:
  struct Content {
    std::deque<Collective> collectives;
    std::deque<Communicator::Between> between;
    std::vector<int> left;  // all local ranks that have left so far: the operations of these are all here
  };

  // Takes the operation; false, and nothing is taken, after close().
  template <class Work>
  bool put(Work* work) {
    const Lock lock(mutex_);
    if (closed_) return false;
    if (first_put_ns_ < 0) first_put_ns_ = now_ns();
    if constexpr (std::is_same_v<Work, Collective>) {
      content_.collectives.push_back(std::move(*work));
    } else {
      content_.between.push_back(std::move(*work));
    }
    return true;
  }
  // Local rank `rank` has left, and all that it submitted has been put in. False: it was known already.
  bool note_left(int rank) {
    const Lock lock(mutex_);
    std::vector<int>& left = content_.left;
    if (std::find(left.begin(), left.end(), rank) != left.end()) return false;
    left.push_back(rank);
    return true;
  }
  void begin_close() { closing_.store(true, std::memory_order_release); }
  bool closing() const { return closing_.load(std::memory_order_acquire); }
  // Something outside has changed: await() looks again.
  void notify() {
    const Lock lock(mutex_);  // so that nobody is between its test and its sleep
    changed_.notify_all();
  }

  bool empty() const {
    const Lock lock(mutex_);
    return content_.collectives.empty() && content_.between.empty();
  }
  Content take() {
    const Lock lock(mutex_);
    return {std::exchange(content_.collectives, {}), std::exchange(content_.between, {}), content_.left};
  }
  // Takes all; nothing more is accepted.
  Content close() {
    const Lock lock(mutex_);
    closed_ = true;
    changed_.notify_all();
    return std::exchange(content_, {});
  }
  // Sleeps until `done()`, which is asked again after each notify(). False: `limit_ns` have passed since the first
  // operation was put in (< 0: no limit).
  template <class Done>
  bool await(const Done& done, int64_t limit_ns = -1) {
    Lock lock(mutex_);
    while (!done()) {
      if (limit_ns < 0 || first_put_ns_ < 0) {
        changed_.wait(lock);
        continue;
      }
      const int64_t left = first_put_ns_ + limit_ns - now_ns();
      if (left <= 0) return false;
      changed_.wait_for(lock, std::chrono::nanoseconds(left));
    }
    return true;
  }

  // Returns the answer about operations that have waited since before `before_ns`; empty if none comes within 200 ms.
  // `wake` makes the executor's thread look.
  template <class Wake>
  std::string ask(int64_t before_ns, const Wake& wake) {
    Lock lock(mutex_);
    if (closed_) return "";
    before_ns_ = before_ns;
    asked_.store(true, std::memory_order_release);
    lock.unlock();
    wake();
    lock.lock();
    changed_.wait_for(lock, std::chrono::milliseconds(200),
                      [this]() REQUIRES(mutex_) { return !asked_.load() || closed_; });
    return asked_.load() || closed_ ? "" : answer_;
  }
  // Answers a question, if there is one: `describe(before_ns)` returns the answer.
  template <class Describe>
  void answer(const Describe& describe) {
    if (!asked_.load(std::memory_order_acquire)) return;
    const Lock lock(mutex_);
    answer_ = describe(before_ns_);
    asked_.store(false, std::memory_order_release);
    changed_.notify_all();
  }

 private:
  mutable Mutex mutex_;
  Condition changed_;
  Content content_ GUARDED_BY(mutex_);
  int64_t first_put_ns_ GUARDED_BY(mutex_) = -1;
  bool closed_ GUARDED_BY(mutex_) = false;
  std::atomic<bool> closing_{false};
  std::atomic<bool> asked_{false};  // set under mutex_
  int64_t before_ns_ GUARDED_BY(mutex_) = 0;
  std::string answer_ GUARDED_BY(mutex_);
};

}  // namespace bagua
