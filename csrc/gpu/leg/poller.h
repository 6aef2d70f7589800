// Polls CUDA events from the watcher thread.
//
// CUDA does not notify anybody when an event has passed, so events are polled. A poll may hang while another thread
// holds the context's lock; the poller holds no lock of its own during a poll.
//
// Thread safety: any thread, but only one thread calls poll().
#pragma once

#include <cstdint>
#include <functional>
#include <map>

#include "base/mutex.h"

namespace bagua::device {

class Poller {
 public:
  // Each poll() calls `look`, with the device set.
  uint64_t add(std::function<void()> look);
  // When it returns, `look` is not running and will not run again. False: `look` was running and did not return within
  // 10 s.
  bool remove(uint64_t id);
  // Calls every `look` once.
  void poll();
  // When the running `look` began, if that was more than a second ago; otherwise 0.
  int64_t hanging_since();

 private:
  Mutex mutex_;
  Condition back_;
  uint64_t next_ = 1, at_ GUARDED_BY(mutex_) = 0;  // at_: id of the look that is running; 0: none
  int64_t since_ns_ GUARDED_BY(mutex_) = 0;        // since when it runs
  std::map<uint64_t, std::function<void()>> looks_ GUARDED_BY(mutex_);
};

}  // namespace bagua::device
