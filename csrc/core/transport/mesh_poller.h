// Finds the streams of a mesh that can be read or written: by epoll, and by a list of streams with unread bytes for
// which no new event will come.
//
// Thread safety: the thread that drives the mesh only, except for signal().
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
  // Lets epoll report the stream when the missing part of a frame has arrived, or a large piece of it.
  void set_low_water(Stream* stream);
  // Fills in at most kEvents events and returns their number; ignore events without a stream. `timeout_ms`: see
  // epoll_wait().
  int wait(int timeout_ms, epoll_event* events);
  // Makes the present or next wait() return. Any thread.
  void signal() { event_.signal(); }

  void make_ready(Stream* stream);
  bool any_ready() const { return !ready_.empty(); }
  // Returns the list and empties it. Clear `queued` of a stream before reading it.
  std::vector<Stream*> take_ready();
  // Drops data streams: they will not be read any more.
  void forget_data();

 private:
  Shared* const shared_;
  Fd epoll_;
  EventFd event_;
  std::vector<Stream*> ready_;
};

}  // namespace bagua::mesh
