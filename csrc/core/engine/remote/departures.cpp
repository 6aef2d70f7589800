#include "engine/remote/departures.h"

#include <algorithm>

#include "base/clock.h"

namespace bagua {

namespace {

constexpr int64_t kDepartureGraceNs = kNsPerS;  // without progress, after a host said that it closes

}  // namespace

Departures::Departures(GenerationState* state, const Communicator* comm, Mesh* mesh, const Exchange* exchange,
                       PointToPoint* p2p, RingSurvey* survey)
    : state_(state),
      comm_(comm),
      mesh_(mesh),
      exchange_(exchange),
      p2p_(p2p),
      survey_(survey),
      peers_(static_cast<size_t>(comm->hosts())),
      departed_(new std::atomic<bool>[static_cast<size_t>(comm->hosts())]()) {}

void Departures::on_close(int index, uint64_t done, const std::string& why) {
  Peer& peer = peers_[static_cast<size_t>(index)];
  if (peer.since_ns >= 0) return;
  peer.since_ns = now_ns();
  peer.done = done;
  peer.why = why;
  departed_[static_cast<size_t>(index)].store(true, std::memory_order_release);
  mesh_->let_go(index);
  survey_->departing(index);
}

void Departures::on_left(const message::Left& left) {
  if (const int index = comm_->index_of(left.rank); index >= 0) p2p_->left(index, left.sends, left.how);
}

void Departures::settle(int64_t progress_ns) {
  const std::string needed = p2p_->needs_departed();
  if (!needed.empty()) state_->fail(needed);
  for (int peer = 0; peer < comm_->hosts(); ++peer) {
    if (peers_[static_cast<size_t>(peer)].since_ns >= 0) settle(peer, progress_ns);
  }
}

// Hosts that begin nothing more: what they have not done will never be.
void Departures::settle(int index, int64_t progress_ns) {
  Peer& peer = peers_[static_cast<size_t>(index)];
  const bool with_ranks = p2p_->pending_with(index);
  if (!peer.answered && !with_ranks && exchange_->done() >= peer.done) {
    mesh_->send_control(index, encode(message::Closed{}));
    peer.answered = true;
  }
  std::string needed = exchange_->oldest(peer.done);
  const bool stuck = now_ns() - std::max(progress_ns, peer.since_ns) > kDepartureGraceNs;
  if (needed.empty() && with_ranks && stuck) needed = "a send or recv of " + comm_name(comm_->id());
  if (needed.empty()) return;
  const std::string host = comm_->host_text(index), rest = ", but " + needed + " still needs it";
  if (!peer.why.empty()) return state_->fail(host + " has " + peer.why + rest);
  state_->lose({host + " has left the job" + rest, -1, comm_->job_hosts()[static_cast<size_t>(index)]});
}

bool Departures::is_told(int rank) const {
  return std::find(told_left_.begin(), told_left_.end(), rank) != told_left_.end();
}

void Departures::tell_left(const std::vector<int>& left) {
  if (left.size() == told_left_.size()) return;
  for (const int rank : left) {
    if (!p2p_->pending(rank) && !is_told(rank)) tell_left(rank, "has left the job in good order");
  }
}

void Departures::tell_all_left(const std::string& how) {
  for (const int rank : comm_->local_ranks()) {
    if (!is_told(rank)) tell_left(rank, how);
  }
}

void Departures::tell_left(int rank, const std::string& how) {
  told_left_.push_back(rank);
  for (size_t peer = 0; peer < peers_.size(); ++peer) {
    if (self(peer)) continue;
    const uint64_t sends = p2p_->sends_begun(comm_->index_of(rank), static_cast<int>(peer));
    mesh_->send_control(static_cast<int>(peer), encode(message::Left{rank, sends, how}));
  }
}

void Departures::tell_close(const std::string& why) {
  if (told_close_) return;
  told_close_ = true;
  tell_all(message::Close{exchange_->done(), why});
}

void Departures::tell_all(const Control& control) {
  const std::string bytes = encode(control);
  for (size_t peer = 0; peer < peers_.size(); ++peer) {
    if (!self(peer)) mesh_->send_control(static_cast<int>(peer), bytes);
  }
}

void Departures::part(int index) {
  Peer& peer = peers_[static_cast<size_t>(index)];
  peer.heard_end = true;
  if (peer.answered) return;
  peer.answered = true;
  mesh_->send_control(index, encode(message::Closed{}));
}

void Departures::part_with_departed() {
  for (size_t peer = 0; peer < peers_.size(); ++peer) {
    if (peers_[peer].since_ns >= 0) part(static_cast<int>(peer));
  }
}

void Departures::give_up_unreachable() {
  for (size_t peer = 0; peer < peers_.size(); ++peer) {
    if (!mesh_->can_tell(static_cast<int>(peer))) peers_[peer].heard_end = true;
  }
}

bool Departures::any_departed() const {
  return std::any_of(peers_.begin(), peers_.end(), [](const Peer& peer) { return peer.since_ns >= 0; });
}

bool Departures::all_departed() const {
  for (size_t peer = 0; peer < peers_.size(); ++peer) {
    if (!self(peer) && peers_[peer].since_ns < 0) return false;
  }
  return true;
}

bool Departures::all_ended() const {
  for (size_t peer = 0; peer < peers_.size(); ++peer) {
    if (!self(peer) && !peers_[peer].heard_end) return false;
  }
  return true;
}

}  // namespace bagua
