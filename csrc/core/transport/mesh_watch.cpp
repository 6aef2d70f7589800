#include "transport/mesh_watch.h"

#include <algorithm>

#include "base/clock.h"
#include "base/text.h"

namespace bagua::mesh {

namespace {

constexpr int64_t kInspectNs = kNsPerS;  // how often connections are inspected while the caller waits

}  // namespace

void Watch::set_waiting(bool waiting) {
  if (waiting == (waiting_ns_ >= 0)) return;
  waiting_ns_ = waiting ? now_ns() : -1;
  for (Peer& peer : shared_->peers) peer.ping_ns = -1;  // forgets older pings
}

// The latest byte or the beginning of the wait, whichever came later.
int64_t Watch::quiet_since(const Peer& peer) const {
  return std::max(waiting_ns_, peer.heard_ns);
}

int64_t Watch::ping_after() const {
  return std::min(kPingAfterNs, silence_ns_ / 3);
}

int64_t Watch::patience(const Peer& peer) const {
  return peer.heard_ns < 0 ? first_word_ns_ : silence_ns_;
}

void Watch::look() {
  if (waiting_ns_ < 0) return;
  const int64_t now = now_ns();
  const bool due = now - inspected_ns_ >= kInspectNs;
  if (due) inspected_ns_ = now;
  for (Peer& peer : shared_->peers) {
    if (watched(peer)) ask(&peer, now);
    if (due && watched(peer)) inspect(&peer);
  }
}

int64_t Watch::deadline() const {
  int64_t first = -1;
  for (const Peer& peer : shared_->peers) {
    if (!watched(peer)) continue;
    const int64_t word = peer.ping_ns < 0 ? quiet_since(peer) + ping_after() : peer.ping_ns + patience(peer);
    const int64_t at = std::min(word, inspected_ns_ + kInspectNs);
    if (first < 0 || at < first) first = at;
  }
  return first;
}

void Watch::ask(Peer* peer, int64_t now) {
  if (peer->ping_ns < 0) {
    if (now - quiet_since(*peer) < ping_after()) return;
    for (const auto& stream : peer->streams) {  // too few bytes for an event are a sign of life, too
      if (stream == nullptr || stream->low_water == 1) continue;
      stream->reader.readable();
      poller_->make_ready(stream.get());
    }
    peer->ping_ns = now;
    return outbox_->post(peer, {FrameType::kPing, 0, 0, nullptr, 0, 0, now, {}});
  }
  if (now - peer->ping_ns < patience(*peer)) return;
  const int index = peer->lane()->peer;
  shared_->fail(
      {Code::kTimeout, shared_->name(index) + " has not answered for " + duration_text(now - quiet_since(*peer)) +
                           ": its connections are open, but its daemon does not run. Is it stopped, swapped "
                           "out or starved of processor time?"},
      index);
}

void Watch::inspect(Peer* peer) {
  for (const auto& stream : peer->streams) {
    if (stream == nullptr || stream->ended || stream->write_broken) continue;
    const int64_t quiet_ns = unacknowledged_ns(stream->socket.get());
    if (quiet_ns < Mesh::kDeadConnectionNs) continue;
    stream->ended = true;
    return losses_->lose(stream.get(), "nothing has been acknowledged for " + duration_text(quiet_ns) +
                                           ": the machine or the network between is down");
  }
}

}  // namespace bagua::mesh
