// Tells the daemon at once that a rank is killed. The kernel frees a process's memory before it closes its sockets and
// tells its parent: 40 ms for each GB here. But first of all it looks at the robust mutexes that a dying thread holds,
// and wakes those who sleep on them. So each rank locks such a mutex for as long as it lives, in a page that the daemon
// maps as well.
//
// A mutex whose owner died proves nothing: a thread may end, or the page be scribbled on. So the daemon looks at /proc,
// and takes for dying a process whose end by a signal has begun, which nothing can undo. All other ends, those with an
// exit code, are told by the process's socket and its parent, as ever.
//
// Thread safety: lifeline() may be called from any thread; the thread that makes a DeathWatch ends it.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <memory>
#include <thread>

#include "base/fd.h"
#include "base/status.h"
#include "channel/memory.h"

namespace bagua {

// The rank's end: a descriptor of this process's page, which lasts as long as the process. The first call makes it, and
// its thread should live as long. -1: there is none to be had, and deaths are told later.
int lifeline();

// Whether the process is dying of a signal, or has, and was not reaped yet.
bool dies_of_signal(pid_t pid);

// The daemon's end: a thread that sleeps until the rank's mutex has lost its owner.
class DeathWatch {
 public:
  // `page`: from the rank. nullptr: it is none of ours, or there are no means.
  static std::unique_ptr<DeathWatch> create(const Fd& page, pid_t pid);
  ~DeathWatch();
  DeathWatch(const DeathWatch&) = delete;
  DeathWatch& operator=(const DeathWatch&) = delete;

  // Readable once the process is dying of a signal.
  int fd() const { return died_.fd(); }

 private:
  DeathWatch(std::shared_ptr<Mapping> page, pid_t pid) : page_(std::move(page)), pid_(pid) {}
  void run();
  std::atomic<uint32_t>* word() const;

  const std::shared_ptr<Mapping> page_;
  const pid_t pid_;
  EventFd died_;
  std::atomic<bool> stopping_{false}, over_{false};
  std::thread thread_;
};

}  // namespace bagua
