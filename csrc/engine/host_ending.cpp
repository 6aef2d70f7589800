// How a HostExecutor ends: hosts that leave, the goodbye of this one, a failure told to all.
#include <algorithm>

#include "base/clock.h"
#include "engine/host_executor.h"

namespace bagua {

namespace {

constexpr int64_t kDepartureGraceNs = kNsPerS;  // without progress, after a host said that it closes
constexpr int64_t kLeaveNs = 1500 * kNsPerMs;   // for the others to say that they are done with us
constexpr int64_t kErrorLingerNs = 300 * kNsPerMs;

}  // namespace

// Hosts that are closing: let them go when nothing is pending; if something is and does not move, it never will.
void HostExecutor::watch_departures() {
  const std::string departed_end = p2p_.needs_departed();
  if (!departed_end.empty()) state_->fail(departed_end);
  const bool idle = exchange_.idle() && p2p_.idle();
  for (int peer = 0; peer < comm_->hosts(); ++peer) {
    Departure& departure = departures_[static_cast<size_t>(peer)];
    if (departure.since_ns < 0) continue;
    if (idle && !departure.answered) {
      Control control;
      control.type = Control::Type::kClosed;
      mesh_.send_control(peer, encode(control));
      departure.answered = true;
    } else if (!idle && now_ns() - std::max(progress_ns_, departure.since_ns) > kDepartureGraceNs) {
      const std::string operation = exchange_.oldest();
      state_->fail(host_text(peer) + " has left the job" + (departure.why.empty() ? "" : " (" + departure.why + ")") +
                   ", but " + (operation.empty() ? "a send or recv of " + comm_name(comm_->id()) : operation) +
                   " still needs it");
    }
  }
}

void HostExecutor::leave() {
  Control control;
  control.type = Control::Type::kClose;
  control.text = closing_.load() && !state_->failed() ? "" : state_->error();
  tell_all(control);
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
    for (const Mesh::Completion& completion : completions_) {
      Control control;
      if (completion.event != Mesh::Event::kControl || !decode(completion.control, &control)) continue;
      if (control.type == Control::Type::kClose) part(completion.peer);
      if (control.type == Control::Type::kError || control.type == Control::Type::kClosed) {
        heard_end_[static_cast<size_t>(completion.peer)] = true;
      }
    }
    if (!status) return;
  }
}

void HostExecutor::finish() {
  std::deque<Collective> collectives;
  std::deque<Half> halves;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (departed_ && !state_->failed() && !closing()) return;
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
  for (const Half& half : halves) ranks_->complete(half.operation, half.operation.submitted_ns, false);
}

// After a failure the connections have ended, after the cause was told; after a departure they are kept, though nobody
// moves bytes any more, until this host leaves, too.
void HostExecutor::stay_until_closed() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!closing_.load()) {
    if (departed_ && !ended_ && (!collectives_.empty() || !halves_.empty() || state_->failed())) {
      lock.unlock();
      state_->fail("another host has left the job in good order, but an operation of " + comm_name(comm_->id()) +
                   " still needs it");
      report_failure();
      finish();
      lock.lock();
      continue;
    }
    changed_.wait(lock);
  }
  if (ended_) return;
  lock.unlock();
  finish();
}

}  // namespace bagua
