// How the connections of a mesh begin and end.
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/text.h"
#include "transport/mesh_parts.h"

namespace bagua::mesh {

Connections::Connections(Shared* shared, Poller* poller, Outbox* outbox)
    : shared_(shared),
      poller_(poller),
      outbox_(outbox),
      missing_((shared->options.hosts - 1) * shared->options.streams) {}

void Connections::attach(int peer, int stream, Connection connection) {
  {
    const Lock lock(mutex_);
    if (closed_) return;
    attached_.push_back({peer, stream, std::move(connection)});
    any_.store(true, std::memory_order_release);
  }
  poller_->signal();
}

void Connections::adopt() {
  if (!any_.load(std::memory_order_acquire)) return;
  std::vector<Attached> taken;
  {
    const Lock lock(mutex_);
    taken.swap(attached_);
    any_.store(false, std::memory_order_relaxed);
  }
  for (Attached& item : taken) add(item.peer, item.stream, std::move(item.connection));
}

void Connections::close() {
  const Lock lock(mutex_);
  closed_ = true;
  attached_.clear();
  any_.store(false, std::memory_order_relaxed);
}

void Connections::add(int peer_index, int index, Connection connection) {
  const MeshOptions& options = shared_->options;
  if (peer_index < 0 || peer_index >= options.hosts || peer_index == options.host) return;
  if (index < 0 || index > options.streams || !connection.socket.valid()) return;
  Peer& peer = shared_->peer(peer_index);
  auto& slot = peer.streams[static_cast<size_t>(index)];
  if (slot != nullptr) return;
  if (Status set = set_nonblocking(connection.socket.get()); !set) return shared_->fail(std::move(set));
  slot = std::make_unique<Stream>();
  slot->encrypted = connection.encrypted();
  slot->socket = std::move(connection.socket);
  if (slot->encrypted) {
    slot->writer.protect(std::move(connection.seals.out));
    slot->reader.protect(std::move(connection.seals.in));
  }
  slot->peer = peer_index;
  slot->index = index;
  slot->lane = index == options.streams;
  if (!slot->lane) {
    --missing_;
    ++peer.attached;
  }
  slot->ended = shared_->retired && !slot->lane;
  if (slot->ended) return;
  poller_->watch(slot.get(), EPOLLIN | EPOLLRDHUP);
  outbox_->pump(&peer);
}

void Connections::need(Peer* peer) {
  if (missing_ > 0 && peer->needed_ns < 0 && peer->attached < shared_->options.streams) peer->needed_ns = now_ns();
}

Status Connections::overdue(int64_t now, int* late) const {
  if (missing_ == 0) return Status::ok();
  for (size_t i = 0; i < shared_->peers.size(); ++i) {
    const Peer& peer = shared_->peers[i];
    if (!awaited(peer) || now - peer.needed_ns < shared_->options.connect_timeout_ns) continue;
    *late = static_cast<int>(i);
    return {Code::kTimeout, shared_->name(static_cast<int>(i)) + " has connected " + std::to_string(peer.attached) +
                                " of " + std::to_string(shared_->options.streams) + " streams in " +
                                duration_text(now - peer.needed_ns) +
                                ": check that its daemon runs and that its data port can be reached from here"};
  }
  return Status::ok();
}

int64_t Connections::deadline() const {
  if (missing_ == 0) return -1;
  int64_t first = -1;
  for (const Peer& peer : shared_->peers) {
    if (!awaited(peer)) continue;
    const int64_t at = peer.needed_ns + shared_->options.connect_timeout_ns;
    if (first < 0 || at < first) first = at;
  }
  return first;
}

bool can_tell(const Peer& peer) {
  const Stream* lane = peer.lane();
  return lane != nullptr && !lane->ended && !lane->write_broken;
}

void Ending::retire() {
  if (shared_->retired) return;
  connections_->adopt();
  shared_->retired = true;
  cause_ = std::exchange(shared_->status, Status::ok());
  watch_->set_waiting(false);
  poller_->forget_data();
  for (Peer& peer : shared_->peers) {
    peer.data.clear();
    peer.queued_bytes = 0;
    peer.posted.clear();
    peer.needed_ns = peer.lost_ns = peer.ping_ns = -1;
    for (const auto& stream : peer.streams) {
      if (stream == nullptr || stream->lane) continue;
      poller_->unwatch(stream.get());
      // Its socket stays open: a peer that saw it closed might not wait for our last control messages.
      stream->ended = true;
      stream->parked = stream->queued = false;
    }
  }
}

void Ending::hang_up() {
  retire();
  hanging_up_ = true;
}

void Ending::settle() {
  if (hanging_up_) end_lanes();
  if (!shared_->retired) return;
  if (std::any_of(shared_->peers.begin(), shared_->peers.end(), can_tell)) return;
  shared_->fail(cause_ ? Status(Code::kUnavailable, "no connection to any other host is left") : cause_);
}

void Ending::end_lanes() {
  for (const Peer& peer : shared_->peers) {
    Stream* lane = peer.lane();
    if (lane == nullptr || lane->write_broken || lane->writer.busy() || !peer.control.empty()) continue;
    ::shutdown(lane->socket.get(), SHUT_WR);  // may be called again
  }
}

// Control lanes are closed in one direction only: closing a socket with unread bytes would send a reset, which may
// overtake the last messages. Data streams are reset: a peer that reads no more must not hold our memory, and must not
// wait for the rest.
void Ending::shut_down() {
  retire();
  connections_->close();
  shared_->fail(cause_ ? Status(Code::kUnavailable, "the connections of this host have been closed") : cause_);
  const linger at_once{1, 0};
  for (Peer& peer : shared_->peers) {
    for (const auto& stream : peer.streams) {
      if (stream == nullptr || !stream->socket.valid()) continue;
      poller_->unwatch(stream.get());
      stream->ended = true;
      if (stream->lane) {
        ::shutdown(stream->socket.get(), SHUT_WR);
        continue;
      }
      ::setsockopt(stream->socket.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
      stream->socket.reset();
    }
  }
}

}  // namespace bagua::mesh
