#include "engine/dialler.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/text.h"
#include "engine/host_names.h"
#include "net/socket.h"

namespace bagua {

namespace {

constexpr int64_t kDialSliceNs = 2 * kNsPerS;  // how often a dialler looks whether the generation has failed

}  // namespace

bool Dialler::connect(ExecutorInbox* inbox) {
  if (!await_peers(inbox)) return false;
  const int64_t deadline = now_ns() + state_->job().options().connect_timeout_ns;
  for (int peer = comm_->topology().host + 1; peer < comm_->hosts(); ++peer) {
    // The control lane, number `streams`, comes first: it is the one that tells of the peer's death.
    for (int stream = state_->job().options().streams; stream >= 0; --stream) {
      const Status status = dial(peer, stream, deadline);
      if (state_->over()) return false;
      if (status) continue;
      if (inbox->closing()) return false;
      const int host = comm_->job_hosts()[static_cast<size_t>(peer)];
      const std::string text = "no connection to " + host_text(state_->membership(), *comm_, peer) + " at " +
                               network_->peer_address(host) + ": " + status.message();
      const bool lost = status.code() == Code::kTimeout || status.code() == Code::kUnavailable;
      lost ? state_->lose({text, -1, host}) : state_->fail(text);
      return false;
    }
  }
  return true;
}

bool Dialler::await_peers(ExecutorInbox* inbox) {
  const int64_t timeout = state_->job().options().connect_timeout_ns;
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
  do {
    Connection connection;
    status = connect_tcp(address, std::min(deadline_ns, now_ns() + kDialSliceNs), &connection.socket);
    if (!status) continue;
    const int64_t slice = std::min(deadline_ns, now_ns() + kDialSliceNs);
    const Credentials& credentials = state_->job().options().credentials;
    status = dial_handshake(connection.socket.fd(), credentials, me, slice, &connection.seals);
    if (status) {
      mesh_->attach(peer, stream, std::move(connection));
      return status;
    }
    // A host that is not there yet, or has died, may come back. What the two have told each other stays.
    if (status.code() != Code::kTimeout && status.code() != Code::kUnavailable) return status;
  } while (now_ns() < deadline_ns && !state_->over());
  return status;
}

}  // namespace bagua
