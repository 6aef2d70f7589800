// Finds the streams of a mesh that can be read or written: by epoll, and by a list of streams that still hold unread
// bytes without a new event.
//
// Thread safety: the thread that drives the mesh only, but signal().
#pragma once

#include <sys/epoll.h>

#include <cstdint>
#include <vector>

#include "base/fd.h"
#include "transport/mesh_shared.h"

namespace bagua::mesh {

class Poller {
 public:
  static constexpr int kEvents = 64;

  explicit Poller(Shared* shared);

  void watch(Stream* stream, uint32_t events);
  void unwatch(Stream* stream);
  // Lets epoll tell of the stream when the missing part of a frame is there, or a good piece of it.
  void set_low_water(Stream* stream);
  // Fills at most kEvents, returns how many; of an event without a stream nothing is left to do. `timeout_ms` as of
  // epoll_wait().
  int wait(int timeout_ms, epoll_event* events);
  // Makes a wait() in progress (or the next) return. Any thread.
  void signal() { event_.signal(); }

  void make_ready(Stream* stream);
  bool any_ready() const { return !ready_.empty(); }
  // Empties the list; whoever reads one of them clears its `queued` first.
  std::vector<Stream*> take_ready();
  // Of data streams nothing will be read any more.
  void forget_data();

 private:
  Shared* const shared_;
  Fd epoll_;
  EventFd event_;
  std::vector<Stream*> ready_;
};

}  // namespace bagua::mesh
