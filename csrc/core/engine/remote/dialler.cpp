#include "engine/remote/dialler.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "base/scarcity.h"
#include "base/text.h"
#include "net/socket.h"

namespace bagua {

namespace {

constexpr int64_t kDialSliceNs = 2 * kNsPerS;           // how often a dialler looks whether the generation is over
constexpr size_t kCallers = 16;                         // connections that are made at the same time
constexpr int kFirstPauseMs = 2, kLongestPauseMs = 32;  // before a host that has not followed is dialled again
constexpr int kLongestLaterMs = 1000;                   // and one that has no room, while that lasts

}  // namespace

bool Dialler::begin(ExecutorInbox* inbox) {
  if (!await_peers(inbox)) return false;
  const int64_t deadline = now_ns() + state_->job().options.connect_timeout_ns;
  // Control lanes, with number `streams`, come first: they tell of a peer's death.
  for (int stream = state_->job().options.streams; stream >= 0; --stream) {
    for (int peer = comm_->topology().host + 1; peer < comm_->hosts(); ++peer) calls_.push_back({peer, stream});
  }
  if (Status status = stop_.open(); !status) {
    state_->fail(status.message());
    return false;
  }
  left_ = calls_.size();
  for (size_t i = std::min(calls_.size(), kCallers); i > 0; --i) {
    try {
      helpers_.emplace_back([this, deadline] { work(deadline); });
    } catch (const std::system_error&) {  // fewer will do
      if (!helpers_.empty()) break;
      state_->fail("can't connect to other hosts: " + no_thread_text());
      return false;
    }
  }
  return true;
}

void Dialler::work(int64_t deadline_ns) {
  for (size_t i = next_++; i < calls_.size() && !failed_; i = next_++) {
    Call* const call = &calls_[i];
    call->status = dial(call->peer, call->stream, deadline_ns);
    if (call->status) {
      if (--left_ == 0) mesh_->wake();
      continue;
    }
    const Call* none = nullptr;
    if (!failed_) refused_.compare_exchange_strong(none, call);
    failed_ = true;
    mesh_->wake();
  }
}

// Helpers that are still at work return at once.
void Dialler::end() {
  if (helpers_.empty()) return;
  failed_ = true;
  stop_.signal();
  {
    const Lock lock(mutex_);
    for (const int fd : shaking_) shutdown(fd, SHUT_RDWR);
  }
  for (std::thread& helper : helpers_) helper.join();
  helpers_.clear();
}

Loss Dialler::loss() const {
  const Call& call = *refused_.load();
  const int host = comm_->job_hosts()[static_cast<size_t>(call.peer)];
  return {"no connection to " + comm_->host_text(call.peer) + " at " + network_->peer_address(host) + ": " +
              call.status.message(),
          -1, host};
}

// One that can't prove who it is, or speaks another wire version, is none of ours.
bool Dialler::may_pass() const {
  const Status& status = refused_.load()->status;
  return status.code() == Code::kCorrupt || worth_retrying(status);
}

// A host that is not there yet, or has died, may come back; one that is in an earlier generation may follow.
bool Dialler::worth_retrying(const Status& status) const {
  if (status.code() == Code::kAborted) return state_->job().options.elastic;
  return status.code() == Code::kTimeout || status.code() == Code::kUnavailable || status.code() == Code::kLater;
}

bool Dialler::await_peers(ExecutorInbox* inbox) {
  const int64_t timeout = state_->job().options.connect_timeout_ns;
  if (inbox->await([this] { return state_->over() || network_->peers_known(); }, timeout)) return !state_->over();
  state_->lose({"the addresses of the other hosts did not come within " + duration_text(timeout) +
                ": is the coordinator running, and are all hosts of the job up?"});
  return false;
}

Status Dialler::dial(int peer, int stream, int64_t deadline_ns) {
  const int to = comm_->job_hosts()[static_cast<size_t>(peer)];
  const std::string address = network_->peer_address(to);
  PeerInfo me;
  me.generation = state_->membership().generation;
  me.comm = comm_->id();
  me.instance = comm_->instance();
  me.from = static_cast<uint32_t>(state_->membership().host_index);
  me.to = static_cast<uint32_t>(to);
  me.stream = static_cast<uint32_t>(stream);
  Status status;
  int pause = kFirstPauseMs;
  do {
    Connection connection;
    const int64_t slice = std::min(deadline_ns, now_ns() + kDialSliceNs);
    status = connect_tcp(address, slice, &connection.socket, stop_.fd());
    if (status) {
      status = shake_hands(&connection, me, {std::min(deadline_ns, now_ns() + kDialSliceNs), deadline_ns});
    }
    if (status) {
      mesh_->attach(peer, stream, std::move(connection));
      return status;
    }
    const bool scarce = status.code() == Code::kResource;   // of descriptors, here
    if (!scarce && !worth_retrying(status)) return status;  // what the two have told each other stays
    const bool later = status.code() == Code::kLater;
    pollfd stopped{stop_.fd(), POLLIN, 0};
    poll(&stopped, 1, pause);
    pause = std::min(2 * pause, later ? kLongestLaterMs : kLongestPauseMs);
    // The host is there. Its ranks may make the communicator much later than ours do.
    if (later) deadline_ns = now_ns() + state_->job().options.connect_timeout_ns;
  } while (now_ns() < deadline_ns && !state_->over() && !failed_);
  return status;
}

Status Dialler::shake_hands(Connection* connection, const PeerInfo& me, const DialDeadlines& deadlines) {
  const int fd = connection->socket.get();
  {
    const Lock lock(mutex_);
    if (failed_) return {Code::kUnavailable, "nobody needs the connection any more"};
    shaking_.insert(fd);
  }
  Status status = dial_handshake(fd, state_->job().options.credentials, me, deadlines, &connection->seals);
  const Lock lock(mutex_);
  shaking_.erase(fd);
  return status;
}

}  // namespace bagua
