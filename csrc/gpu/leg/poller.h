// Polls CUDA events from the watcher thread.
//
// CUDA reports that an event has passed only when it is asked. A poll may hang as long as another thread holds the
// context's lock; the poller holds no lock meanwhile.
//
// Thread safety: any thread; poll() one thread.
#pragma once

#include <cstdint>
#include <functional>
#include <map>

#include "base/mutex.h"

namespace bagua::device {

class Poller {
 public:
  // Every poll() calls `look`, with the device set.
  uint64_t add(std::function<void()> look);
  // After it `look` is not running and will not run. False: it was running and did not return within 10 s.
  bool remove(uint64_t id);
  // Calls every look once.
  void poll();
  // When the look that is running now began, if more than a second ago; else 0.
  int64_t hanging_since();

 private:
  Mutex mutex_;
  Condition back_;
  uint64_t next_ = 1, at_ GUARDED_BY(mutex_) = 0;  // at_: id of the look that is running; 0: none
  int64_t since_ns_ GUARDED_BY(mutex_) = 0;        // it has been running
  std::map<uint64_t, std::function<void()>> looks_ GUARDED_BY(mutex_);
};

}  // namespace bagua::device
