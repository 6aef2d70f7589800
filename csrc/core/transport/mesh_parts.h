// The parts of a mesh, each of which may call those above it. Mesh holds them and runs the loop of poll().
//
// Thread safety: the thread that drives the mesh only, except for Poller::signal() and Connections::attach().
#pragma once

#include <sys/epoll.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/fd.h"
#include "base/mutex.h"
#include "base/status.h"
#include "transport/mesh_shared.h"
#include "transport/seal.h"

namespace bagua::mesh {

// Finds the streams of a mesh that can be read or written: by epoll, and by a list of streams with unread bytes for
// which no new event will come.
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

// Detects lost peers, and decides when a loss is an error.
//
// A peer is lost when the first of its streams fails. The mesh reads its other streams first; then the loss is an error
// only if a message of that peer is still needed. See "Loss of a peer" in mesh.h.
class Losses {
 public:
  Losses(Shared* shared, Poller* poller) : shared_(shared), poller_(poller) {}

  // A stream of the peer has ended or broken.
  void lose(Stream* failed, const std::string& how);
  // Fails the mesh if a lost peer is still needed. Call it when all streams have been read.
  void settle();
  // When settle() must be called again at the latest; -1: no limit.
  int64_t deadline() const;

 private:
  void settle(Peer* peer);
  int64_t deadline(const Peer& peer) const;
  bool wanted(const Peer& peer) const;

  Shared* const shared_;
  Poller* const poller_;
};

// Queues of outgoing messages: for each peer one of control messages and one of chunks. Chooses the stream for the next
// message.
class Outbox {
 public:
  Outbox(Shared* shared, Poller* poller, Losses* losses) : shared_(shared), poller_(poller), losses_(losses) {}

  // Queues a message behind others of its kind, then calls pump().
  void post(Peer* peer, Outgoing message);
  // Hands queued messages to streams until none is free.
  void pump(Peer* peer);
  // Continues where pump() stopped at its budget.
  void pump_again();
  bool has_more() const { return pump_again_; }
  // The socket of `stream` has room again.
  void on_writable(Stream* stream);

 private:
  void flush(Peer* peer, Stream* stream);
  Stream* data_stream(Peer* peer, size_t chunk);
  void update_stream_count(Peer* peer);

  Shared* const shared_;
  Poller* const poller_;
  Losses* const losses_;
  bool pump_again_ = false;
};

// Takes over attached streams, and finds peers that have not connected in time.
class Connections {
 public:
  Connections(Shared* shared, Poller* poller, Outbox* outbox);

  // Leaves a stream for adopt(). After close() it closes the stream instead.
  void attach(int peer, int stream, Connection connection);
  // Moves the streams left by attach() to their peers.
  void adopt();
  // Refuses all later streams.
  void close();

  bool complete() const { return missing_ == 0; }
  // Starts the connect timeout of the peer.
  void need(Peer* peer);
  // Returns kTimeout, with a name, if a peer has not connected in time; `peer` is its number then.
  Status overdue(int64_t now, int* peer) const;
  // When overdue() must be called again at the latest; -1: no limit.
  int64_t deadline() const;
  // Half of that time is over.
  bool doubts(const Peer& peer, int64_t now) const {
    return awaited(peer) && now - peer.needed_ns >= shared_->options.connect_timeout_ns / 2;
  }

 private:
  struct Attached {
    int peer;
    int stream;
    Connection connection;
  };

  void add(int peer, int index, Connection connection);
  bool awaited(const Peer& peer) const { return peer.needed_ns >= 0 && peer.attached < shared_->options.streams; }

  Shared* const shared_;
  Poller* const poller_;
  Outbox* const outbox_;
  int missing_;  // data streams that are not attached yet

  Mutex mutex_;  // guards the streams that attach() leaves for the driving thread
  std::vector<Attached> attached_ GUARDED_BY(mutex_);
  bool closed_ GUARDED_BY(mutex_) = false;
  std::atomic<bool> any_{false};  // attached_ is not empty
};

// Incoming messages: matches frames with posted receives.
class Intake {
 public:
  Intake(Shared* shared, Poller* poller, Losses* losses, Outbox* outbox)
      : shared_(shared), poller_(poller), losses_(losses), outbox_(outbox) {}

  // Posts a receive from host `peer`. If its frame is parked, reading continues.
  void post(int peer, MessageKey key, Posted receive);
  // Reads a stream until it is empty or has used up its turn.
  void read(Stream* stream);

 private:
  bool on_header(Stream* stream);
  bool drop_foreign(Stream* stream);
  bool claim(Stream* stream);
  void on_payload(Stream* stream);
  void on_corrupt(Stream* stream);

  Shared* const shared_;
  Poller* const poller_;
  Losses* const losses_;
  Outbox* const outbox_;  // for the answers to pings
};

// Pings silent peers while the caller waits for them. See "Silence" in mesh.h.
class Watch {
 public:
  // A peer is pinged after at most this long a silence.
  static constexpr int64_t kPingAfterNs = 1'000'000'000;

  Watch(Shared* shared, Poller* poller, Losses* losses, Outbox* outbox)
      : shared_(shared), poller_(poller), losses_(losses), outbox_(outbox) {}

  // Says whether the caller waits for other hosts.
  void set_waiting(bool waiting);
  // Pings silent peers, fails the mesh if one does not answer, and inspects connections.
  void look();
  // When look() must be called again at the latest; -1: no limit.
  int64_t deadline() const;
  // Half of the time is over in which it has to answer.
  bool doubts(const Peer& peer, int64_t now) const {
    return peer.ping_ns >= 0 && now - peer.ping_ns >= patience(peer) / 2;
  }
  // Since when nothing has come from the peer while the caller waited.
  int64_t quiet_since(const Peer& peer) const;

 private:
  bool watched(const Peer& peer) const { return waiting_ns_ >= 0 && peer.lost_ns < 0 && peer.lane() != nullptr; }
  int64_t ping_after() const;
  int64_t patience(const Peer& peer) const;
  void ask(Peer* peer, int64_t now);
  void inspect(Peer* peer);

  Shared* const shared_;
  Poller* const poller_;
  Losses* const losses_;
  Outbox* const outbox_;
  int64_t waiting_ns_ = -1;   // since when the caller waits
  int64_t inspected_ns_ = 0;  // when the connections were inspected
};

// Shuts a mesh down: sends the last control messages, then closes its connections. See Mesh::retire(), hang_up() and
// shut_down().
class Ending {
 public:
  Ending(Shared* shared, Poller* poller, Connections* connections, Watch* watch)
      : shared_(shared), poller_(poller), connections_(connections), watch_(watch) {}

  void retire();
  void hang_up();
  void shut_down();
  // After hang_up(): closes this side of each lane whose messages are all written. After retire(): fails the mesh when
  // no lane is left.
  void settle();

 private:
  void end_lanes();

  Shared* const shared_;
  Poller* const poller_;
  Connections* const connections_;
  Watch* const watch_;
  bool hanging_up_ = false;
  Status cause_;  // the first error when the mesh was retired
};

// True if control messages can go to `peer` on its control lane.
bool can_tell(const Peer& peer);

}  // namespace bagua::mesh
