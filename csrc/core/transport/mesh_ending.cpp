// The end of a mesh: last words on the control lanes, then the end of its connections; see mesh.h.
#include <sys/socket.h>

#include <algorithm>

#include "transport/mesh_impl.h"

namespace bagua {

using mesh::Peer;
using mesh::Stream;

void Mesh::Impl::retire() {
  if (retired) return;
  adopt();
  retired = true;
  cause = status;
  status = Status::ok();
  waiting_ns = -1;
  ready.erase(std::remove_if(ready.begin(), ready.end(), [](const Stream* stream) { return !stream->lane; }),
              ready.end());
  for (Peer& peer : peers) {
    peer.data.clear();
    peer.queued_bytes = 0;
    peer.posted.clear();
    peer.needed_ns = peer.lost_ns = peer.ping_ns = -1;
    for (const auto& stream : peer.streams) {
      if (stream == nullptr || stream->lane) continue;
      unwatch(stream.get());
      stream->ended = true;  // its socket stays open: a peer that loses it early might not wait for the last words
      stream->parked = stream->queued = false;
    }
  }
}

bool Mesh::Impl::any_lane() const {
  return std::any_of(peers.begin(), peers.end(), [](const Peer& peer) {
    const Stream* lane = peer.streams.back().get();
    return lane != nullptr && !lane->ended && !lane->write_broken;
  });
}

void Mesh::Impl::end_lanes() {
  if (!hanging_up) return;
  for (Peer& peer : peers) {
    Stream* lane = peer.streams.back().get();
    if (lane == nullptr || lane->write_broken || lane->writer.busy() || !peer.control.empty()) continue;
    ::shutdown(lane->socket.fd(), SHUT_WR);  // harmless when it is done
  }
}

// Lanes are closed in one direction only: an end with unread bytes would be a reset, which may overtake the last words.
// Chunks are reset: whoever takes none any more must not hold our memory, nor wait for the rest.
void Mesh::Impl::shut_down() {
  retire();
  {
    std::lock_guard<std::mutex> lock(mutex);
    closed = true;
    attached.clear();
    any_attached.store(false, std::memory_order_relaxed);
  }
  fail(cause ? Status(Code::kUnavailable, "the connections of this host have been closed") : cause);
  const linger at_once{1, 0};
  for (Peer& peer : peers) {
    for (const auto& stream : peer.streams) {
      if (stream == nullptr || !stream->socket.valid()) continue;
      unwatch(stream.get());
      stream->ended = true;
      if (stream->lane) {
        ::shutdown(stream->socket.fd(), SHUT_WR);
        continue;
      }
      ::setsockopt(stream->socket.fd(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
      stream->socket.reset();
    }
  }
}

void Mesh::retire() {
  impl_->retire();
}

void Mesh::hang_up() {
  impl_->retire();
  impl_->hanging_up = true;
}

bool Mesh::can_tell(int peer) const {
  const Stream* lane = impl_->peers[static_cast<size_t>(peer)].streams.back().get();
  return lane != nullptr && !lane->ended && !lane->write_broken;
}

void Mesh::shut_down() {
  impl_->shut_down();
}

}  // namespace bagua
