// Helper threads, which assist NCCL's own thread: they move bytes of connections with many outstanding bytes. A helper
// sleeps in epoll while its connections have nothing to move. Threads are started when the first connection joins, and
// ended when the last one leaves.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "base/fd.h"
#include "base/mutex.h"
#include "base/status.h"

namespace bagua::nccl_net {

class Connection;

class Helper {
 public:
  Status start();
  ~Helper();
  // Tells the helper that `connection` has work. Any thread.
  void wake(Connection* connection);
  // Removes `connection`, and waits until it is not being served.
  void remove(Connection* connection);

 private:
  void run();
  bool serve_all();
  void sleep(uint64_t seen);
  void drop_idle() REQUIRES(mutex_);

  Mutex mutex_;
  Condition served_;
  std::vector<Connection*> active_ GUARDED_BY(mutex_);
  Connection* serving_ GUARDED_BY(mutex_) = nullptr;
  bool asleep_ GUARDED_BY(mutex_) = false;
  bool stop_ GUARDED_BY(mutex_) = false;
  uint64_t calls_ GUARDED_BY(mutex_) = 0;
  Fd epoll_;
  EventFd wake_;
  std::thread thread_;
};

class Helpers {
 public:
  static Helpers& instance();
  // Returns the helper for one more connection, until it leaves; nullptr if no thread can be started.
  Helper* join();
  // Takes `connection` from its helper, which does not use it any more when this returns.
  void leave(Helper* helper, Connection* connection);

 private:
  Mutex mutex_;
  size_t members_ GUARDED_BY(mutex_) = 0;  // connections
  std::vector<std::unique_ptr<Helper>> threads_ GUARDED_BY(mutex_);
  size_t next_ GUARDED_BY(mutex_) = 0;
};

}  // namespace bagua::nccl_net
