#include "transport/mesh_ending.h"

#include <sys/socket.h>

#include <algorithm>
#include <utility>

namespace bagua::mesh {

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
