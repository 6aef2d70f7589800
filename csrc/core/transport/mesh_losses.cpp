// How a mesh finds that peers are lost: by streams that end, and by silence.
#include <algorithm>

#include "base/clock.h"
#include "base/text.h"
#include "transport/mesh_parts.h"

namespace bagua::mesh {

namespace {

constexpr int64_t kInspectNs = kNsPerS;  // how often connections are inspected while the caller waits
// A mesh that has not looked for so long stood still itself, and has not read what peers said.
constexpr int64_t kStandstillNs = 3 * kNsPerS;
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
  return std::min(kPingAfterNs, shared_->options.silence_timeout_ns / 3);
}

int64_t Watch::patience(const Peer& peer) const {
  return peer.heard_ns < 0 ? shared_->options.first_word_timeout_ns : shared_->options.silence_timeout_ns;
}

void Watch::look() {
  if (waiting_ns_ < 0) return;
  const int64_t now = now_ns();
  const bool due = now - inspected_ns_ >= kInspectNs;
  const bool woke = now - inspected_ns_ >= kStandstillNs;
  if (due) inspected_ns_ = now;
  for (Peer& peer : shared_->peers) {
    if (woke && peer.ping_ns >= 0) peer.ping_ns = now;  // it may have stood still as well
    if (watched(peer)) ask(&peer, now);
    if (due && !woke && watched(peer)) inspect(&peer);
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
  int64_t unheard_ns = 0;  // the kernel of a daemon that does not run acknowledges all the same
  for (const auto& stream : peer->streams) {
    if (stream != nullptr) unheard_ns = std::max(unheard_ns, unacknowledged_ns(stream->socket.get()));
  }
  const char* why = unheard_ns > patience(*peer) / 2
                        ? ": not even its machine acknowledges anything. Is it, or the network between, down?"
                        : ": its connections are open, but its daemon does not run. Is it stopped, swapped out or "
                          "starved of processor time?";
  const int index = peer->lane()->peer;
  shared_->fail(
      {Code::kTimeout, shared_->name(index) + " has not answered for " + duration_text(now - quiet_since(*peer)) + why},
      index);
}

void Watch::inspect(Peer* peer) {
  for (const auto& stream : peer->streams) {
    if (stream == nullptr || stream->ended || stream->write_broken) continue;
    const int64_t quiet_ns = unacknowledged_ns(stream->socket.get());
    if (quiet_ns < kDeadConnectionNs) continue;
    stream->ended = true;
    return losses_->lose(stream.get(), "nothing has been acknowledged for " + duration_text(quiet_ns) +
                                           ": the machine or the network between is down");
  }
}

}  // namespace bagua::mesh
