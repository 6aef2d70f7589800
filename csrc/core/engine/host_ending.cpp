// How a HostExecutor ends: hosts that leave, the goodbye of this one, a failure told to all.
#include <algorithm>

#include "base/clock.h"
#include "engine/host_executor.h"

namespace bagua {

namespace {

constexpr int64_t kDepartureGraceNs = kNsPerS;  // without progress, after a host said that it closes
constexpr int64_t kLeaveNs = 1500 * kNsPerMs;   // for the others to say that they are done with us
constexpr int64_t kErrorLingerNs = 300 * kNsPerMs;
constexpr int64_t kHangUpNs = 2 * kNsPerS;  // for the others to hang up, too

}  // namespace

// Hosts that begin nothing more: let them go when all that they have done is done here, too. What they have not done
// will never be.
void HostExecutor::watch_departures() {
  const std::string departed_end = p2p_.needs_departed();
  if (!departed_end.empty()) state_->fail(departed_end);
  for (int peer = 0; peer < comm_->hosts(); ++peer) {
    Departure& departure = departures_[static_cast<size_t>(peer)];
    if (departure.since_ns < 0) continue;
    const bool with_ranks = p2p_.pending_with(peer);
    if (!departure.answered && !with_ranks && exchange_.done() >= departure.done) {
      Control control;
      control.type = Control::Type::kClosed;
      mesh_.send_control(peer, encode(control));
      departure.answered = true;
    }
    std::string needed = exchange_.oldest(departure.done);
    const bool stuck = now_ns() - std::max(progress_ns_, departure.since_ns) > kDepartureGraceNs;
    if (needed.empty() && with_ranks && stuck) needed = "a send or recv of " + comm_name(comm_->id());
    if (needed.empty()) continue;
    state_->fail(host_text(peer) + " has " + (departure.why.empty() ? "left the job" : departure.why) + ", but " +
                 needed + " still needs it");
  }
}

void HostExecutor::say_close(const std::string& why) {
  if (said_close_) return;
  said_close_ = true;
  Control control;
  control.type = Control::Type::kClose;
  control.sequence = exchange_.done();
  control.text = why;
  tell_all(control);
}

bool HostExecutor::all_departed() const {
  for (int peer = 0; peer < comm_->hosts(); ++peer) {
    if (peer != comm_->topology().host && departures_[static_cast<size_t>(peer)].since_ns < 0) return false;
  }
  return true;
}

// The members here have destroyed the communicator, and all that they called is done. Its connections stay until the
// others have done so, too, however long that takes. Then all hang up; nobody loses a last word to an early end.
void HostExecutor::await_others() {
  const std::string how = "destroyed " + comm_name(comm_->id());
  for (const int rank : comm_->local_ranks()) {
    if (std::find(told_left_.begin(), told_left_.end(), rank) == told_left_.end()) say_left(rank, "has " + how);
  }
  say_close(how);
  mesh_.set_waiting(false);
  // With all of them connected nobody dials us any more: the network can forget us.
  while (!(all_departed() && mesh_.connected()) && !state_->failed()) {
    completions_.clear();
    const Status status = mesh_.poll(-1, &completions_);
    count_traffic();
    for (const Mesh::Completion& completion : completions_) hear(completion);
    if (!status) return;
  }
  if (state_->failed()) return;
  mesh_.hang_up();
  const int64_t deadline = now_ns() + kHangUpNs;
  while (now_ns() < deadline && !state_->failed() && mesh_.poll(deadline, &completions_)) completions_.clear();
}

// A word of another host while this one only waits for the end.
void HostExecutor::hear(const Mesh::Completion& completion) {
  Control control;
  if (completion.event != Mesh::Event::kControl || !decode(completion.control, &control)) return;
  const auto peer = static_cast<size_t>(completion.peer);
  const bool close = control.type == Control::Type::kClose, error = control.type == Control::Type::kError;
  if (error || control.type == Control::Type::kClosed) heard_end_[peer] = true;
  if (close || error) depart(completion.peer, control);  // the world's connections tell the engine of an error
  if (close) part(completion.peer);
}

void HostExecutor::depart(int peer, const Control& control) {
  Departure& departure = departures_[static_cast<size_t>(peer)];
  if (departure.since_ns >= 0) return;
  departure = {now_ns(), false, control.sequence, control.text};
  has_departed_[static_cast<size_t>(peer)].store(true, std::memory_order_release);
  mesh_.let_go(peer);
  survey_.departing(peer);
}

void HostExecutor::leave() {
  say_close("");
  converse(now_ns() + kLeaveNs);
}

// Also after the mesh has failed: the lanes that still work carry the cause. Who could not be told, or does not listen,
// loses its connections to us: nobody waits for us for ever.
void HostExecutor::report_failure() {
  mesh_.retire();
  Control control;
  control.type = Control::Type::kError;
  control.text = state_->error();
  tell_all(control);
  for (int peer = 0; peer < comm_->hosts(); ++peer) {
    if (!mesh_.can_tell(peer)) heard_end_[static_cast<size_t>(peer)] = true;
  }
  converse(now_ns() + kErrorLingerNs);
  mesh_.shut_down();
}

// Answers a goodbye when we are ending, too: neither needs the other any more.
void HostExecutor::part(int peer) {
  heard_end_[static_cast<size_t>(peer)] = true;
  Departure& departure = departures_[static_cast<size_t>(peer)];
  if (departure.answered) return;
  departure.answered = true;
  Control control;
  control.type = Control::Type::kClosed;
  mesh_.send_control(peer, encode(control));
}

// Talks until every peer that is connected has heard the end, the mesh fails, or the deadline.
void HostExecutor::converse(int64_t deadline_ns) {
  heard_end_[static_cast<size_t>(comm_->topology().host)] = true;
  for (int peer = 0; peer < comm_->hosts(); ++peer) {  // that said goodbye while we were still at work
    if (departures_[static_cast<size_t>(peer)].since_ns >= 0) part(peer);
  }
  if (!network_->peers_known() || !mesh_.connected()) deadline_ns = std::min(deadline_ns, now_ns() + 20 * kNsPerMs);
  const auto all_done = [this] {
    return std::all_of(heard_end_.begin(), heard_end_.end(), [](bool heard) { return heard; });
  };
  while (!all_done() && now_ns() < deadline_ns) {
    completions_.clear();
    const Status status = mesh_.poll(deadline_ns, &completions_);
    count_traffic();
    for (const Mesh::Completion& completion : completions_) hear(completion);
    if (!status) return;
  }
}

void HostExecutor::finish() {
  std::deque<Collective> collectives;
  std::deque<SendOrRecv> halves;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ended_ = true;
    describe_wanted_ = false;
    collectives.swap(collectives_);
    halves.swap(halves_);
  }
  changed_.notify_all();
  exchange_.abandon();
  p2p_.abandon();
  for (const Collective& operation : collectives) {
    for (const Operation& part : operation.parts) ranks_->complete(part, operation.started_ns, false);
  }
  for (const SendOrRecv& half : halves) ranks_->complete(half.operation, half.operation.submitted_ns, false);
}

// After a failure the connections have ended, after the cause was told.
void HostExecutor::stay_until_closed() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!closing_.load()) changed_.wait(lock);
}

}  // namespace bagua
