// The end of a communicator that spans hosts.
//
// The generation fails: tell the other hosts why, and give them a moment to hear it. The generation is ended: say so,
// and wait until nobody needs us any more (bounded). The communicator is destroyed here: say so, and keep the
// connections until it is destroyed on all other hosts: they may be far behind, still read what was sent before, or
// talk to each other. Another host has said either: what it has done is finished here, too; an operation that it has
// not done fails.

#include <algorithm>
#include <string>
#include <variant>

#include "base/clock.h"
#include "engine/remote/control.h"
#include "engine/remote/host_executor.h"

namespace bagua {

namespace {

constexpr int64_t kLeaveNs = 1500 * kNsPerMs;  // for the others to say that they are done with us
constexpr int64_t kErrorLingerNs = 300 * kNsPerMs;
constexpr int64_t kHangUpNs = 2 * kNsPerS;         // for the others to hang up, too
constexpr int64_t kUnconnectedNs = 20 * kNsPerMs;  // where not all hosts are connected, so that some can't answer

}  // namespace

// One poll of the mesh; hears what has come.
Status HostExecutor::listen(int64_t deadline_ns) {
  const Status status = poll(deadline_ns);
  for (const Mesh::Completion& completion : completions_) hear(completion);
  return status;
}

void HostExecutor::hear(const Mesh::Completion& completion) {
  Control control;
  if (completion.event != Mesh::Event::kControl || !decode(completion.control, &control)) return;
  const int peer = completion.peer;
  if (const auto* close = std::get_if<message::Close>(&control)) {
    departures_.on_close(peer, close->done, close->why);
    departures_.part(peer);
  } else if (const auto* failed = std::get_if<message::Failed>(&control)) {
    // The world's connections tell the engine of it.
    departures_.on_end(peer);
    departures_.on_close(peer, 0, failed->why);
  } else if (std::holds_alternative<message::Closed>(control)) {
    departures_.on_end(peer);
  }
}

// The connections stay until the others have destroyed it, too, however long that takes. Then all hang up; nobody loses
// a last word to an early end.
void HostExecutor::await_others() {
  const std::string how = "destroyed " + comm_name(comm_->id());
  departures_.tell_all_left("has " + how);
  departures_.tell_close(how);
  mesh_.set_waiting(false);
  // With all of them connected nobody dials us any more: the network can forget us.
  while (!(departures_.all_departed() && mesh_.connected()) && !state_->over()) {
    if (!listen(-1)) return;
  }
  if (state_->over()) return;
  mesh_.hang_up();
  const int64_t deadline = now_ns() + kHangUpNs;
  while (now_ns() < deadline && !state_->over() && poll(deadline)) {
  }
}

void HostExecutor::leave() {
  departures_.tell_close("");
  converse(now_ns() + kLeaveNs);
}

void HostExecutor::report_loss() {
  mesh_.retire();
  const Loss loss = state_->loss();
  departures_.tell_all(message::Suspended{loss.member, loss.host, loss.none ? 1u : 0u, loss.text});
  static_cast<void>(listen(now_ns()));  // whatever can be said is said; who does not hear it sees the connections end
  mesh_.shut_down();
}

void HostExecutor::report_failure() {
  mesh_.retire();
  departures_.tell_all(message::Failed{state_->loss().text});
  departures_.give_up_unreachable();
  converse(now_ns() + kErrorLingerNs);
  mesh_.shut_down();
}

// Talks until every peer that is connected has heard the end, the mesh fails, or the deadline.
void HostExecutor::converse(int64_t deadline_ns) {
  departures_.part_with_departed();
  if (!network_->peers_known() || !mesh_.connected()) deadline_ns = std::min(deadline_ns, now_ns() + kUnconnectedNs);
  while (!departures_.all_ended() && now_ns() < deadline_ns) {
    if (!listen(deadline_ns)) return;
  }
}

}  // namespace bagua
