#include "transport/mesh_connections.h"

#include <sys/epoll.h>

#include <memory>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/text.h"

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

}  // namespace bagua::mesh
