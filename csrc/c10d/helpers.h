// Threads that drive queues nobody waits for, and complete futures. There are as many as are busy at once: a callback
// of a future may wait for another future.
//
// Thread safety: any thread.
#pragma once

#include <sys/types.h>

#include <deque>
#include <functional>

#include "base/mutex.h"

namespace bagua::dist {

class Helpers {
 public:
  // One for the process; a fork, in which no thread of its parent lives on, gets its own. It is never destroyed:
  // threads may wait in it when the process ends.
  static Helpers& get();
  // A thread calls `task`, which throws nothing.
  void call(std::function<void()> task);

 private:
  explicit Helpers(pid_t owner) : owner_(owner) {}
  void serve();

  const pid_t owner_;
  Mutex mutex_;
  Condition tasks_or_end_;
  std::deque<std::function<void()>> tasks_;
  size_t idle_ = 0;
};

}  // namespace bagua::dist
