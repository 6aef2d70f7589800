#include "transport/mesh_losses.h"

#include <algorithm>

#include "base/clock.h"

namespace bagua::mesh {

namespace {

// After the first stream of a peer has closed, its other streams may still deliver data in flight for this time.
constexpr int64_t kLossGraceNs = 200 * kNsPerMs;
// The same for a peer that has said goodbye, counted from its latest byte: all that it sent is in sockets already.
constexpr int64_t kGoodbyeGraceNs = 20 * kNsPerS;

}  // namespace

void Losses::lose(Stream* failed, const std::string& how) {
  Peer& peer = shared_->peer_of(failed);
  if (failed->ended) poller_->unwatch(failed);
  // epoll would report the hang-up again and again: stop watching. recv() reads the rest.
  if (failed->parked) poller_->unwatch(failed);
  if (failed->write_broken && !failed->ended && !failed->parked) {
    poller_->unwatch(failed);
    poller_->make_ready(failed);
  }
  if (peer.lost_ns >= 0 || shared_->retired) return;
  peer.lost_ns = now_ns();
  peer.lost = {Code::kUnavailable, "lost " + shared_->name(failed->peer) + ": " + how};
}

int64_t Losses::deadline(const Peer& peer) const {
  if (!peer.let_go) return peer.lost_ns + kLossGraceNs;
  return std::max(peer.lost_ns, peer.heard_ns) + kGoodbyeGraceNs;
}

int64_t Losses::deadline() const {
  int64_t first = -1;
  for (const Peer& peer : shared_->peers) {
    if (peer.lost_ns < 0 || peer.settled) continue;
    const int64_t at = deadline(peer);
    if (first < 0 || at < first) first = at;
  }
  return first;
}

void Losses::settle() {
  for (Peer& peer : shared_->peers) {
    if (peer.lost_ns >= 0) settle(&peer);
  }
}

void Losses::settle(Peer* peer) {
  bool held = false;    // a frame has arrived and waits for its recv()
  bool coming = false;  // more may still arrive
  bool unread = false;  // unread bytes can be read at once
  for (const auto& stream : peer->streams) {
    if (stream == nullptr || stream->ended) continue;
    unread = unread || stream->queued;
    held = held || stream->parked;
    coming = coming || !stream->parked;
  }
  const bool ended = !unread && (!coming || now_ns() >= deadline(*peer));
  if (peer->let_go) peer->control.clear();  // the peer has left
  peer->settled = ended && (held || peer->let_go) && !wanted(*peer);
  if (ended && !peer->settled) shared_->fail(peer->lost, shared_->index_of(*peer));
}

// True if a message from the peer or to it is still outstanding, and needed.
bool Losses::wanted(const Peer& peer) const {
  const uint64_t spare = shared_->options.spare_operation;
  const auto missed = [&peer, spare](uint64_t op) { return !peer.let_go || op != spare; };
  if (!peer.let_go && (peer.awaited || !peer.control.empty())) return true;
  if (std::any_of(peer.posted.begin(), peer.posted.end(), [&](const auto& item) { return missed(item.first.op); }) ||
      std::any_of(peer.data.begin(), peer.data.end(), [&](const Outgoing& message) { return missed(message.op); })) {
    return true;
  }
  return std::any_of(peer.streams.begin(), peer.streams.end(), [&](const auto& stream) {
    if (stream == nullptr || (stream->lane && peer.let_go)) return false;
    return stream->writer.busy() && missed(stream->writer.current().op);
  });
}

}  // namespace bagua::mesh
