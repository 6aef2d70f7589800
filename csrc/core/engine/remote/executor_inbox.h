// Queue from other threads to an executor's thread: operations, receives that seek a source, ranks that have left, and
// the request to close.
//
// Thread safety: any thread; take(), close() and await() belong to the executor's thread. mutex_ guards all members but
// closing_.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
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
  bool put(Collective* operation);
  bool put(Communicator::Between* one);
  // Local rank `rank` has left, and all that it submitted has been put in. False: that is known.
  bool note_left(int rank);
  void begin_close() { closing_.store(true, std::memory_order_release); }
  bool closing() const { return closing_.load(std::memory_order_acquire); }
  // Something outside has changed: await() looks again.
  void notify();

  bool empty() const;
  Content take();
  // Takes all; nothing more is accepted.
  Content close();
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

 private:
  bool accept() REQUIRES(mutex_);

  mutable Mutex mutex_;
  Condition changed_;
  Content content_ GUARDED_BY(mutex_);
  int64_t first_put_ns_ GUARDED_BY(mutex_) = -1;
  bool closed_ GUARDED_BY(mutex_) = false;
  std::atomic<bool> closing_{false};
};

}  // namespace bagua
