// What CUDA tells only to whoever asks (an event has passed) is asked by one thread, the watcher's, every now and then.
// It may hang there as long as another thread holds the context's lock, and holds no lock meanwhile.
//
// Thread safety: any thread; visit() one thread.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>

namespace bagua::device {

class Rounds {
 public:
  // `look` is called in every round, with the device set.
  uint64_t add(std::function<void()> look);
  // After it `look` is not running and will not run. False: it was, and did not come back within 10 s.
  bool remove(uint64_t id);
  // One round.
  void visit();
  // Since when a look has not come back, if that is more than a second; else 0.
  int64_t hanging_since();

 private:
  std::mutex mutex_;  // guards what follows
  std::condition_variable back_;
  uint64_t next_ = 1, at_ = 0;  // at_: whose look is running; 0: none
  int64_t since_ns_ = 0;        // it has been running
  std::map<uint64_t, std::function<void()>> looks_;
};

}  // namespace bagua::device
