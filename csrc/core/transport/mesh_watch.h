// Pings silent peers while the caller waits for them. See "Silence" in mesh.h.
//
// Thread safety: the thread that drives the mesh only.
#pragma once

#include <cstdint>

#include "transport/mesh_losses.h"
#include "transport/mesh_outbox.h"
#include "transport/mesh_poller.h"
#include "transport/mesh_shared.h"

namespace bagua::mesh {

class Watch {
 public:
  // Silence of a peer before it is asked for a sign of life, at most.
  static constexpr int64_t kPingAfterNs = 1'000'000'000;

  Watch(Shared* shared, Poller* poller, Losses* losses, Outbox* outbox)
      : shared_(shared), poller_(poller), losses_(losses), outbox_(outbox) {}

  // Whether the caller waits for other hosts.
  void set_waiting(bool waiting);
  // Asks peers that are silent, fails the mesh for one that does not answer, and looks at connections.
  void look();
  // When look() is to be called again at the latest; -1: no time matters.
  int64_t deadline() const;
  // Since when nothing has come from the peer while the caller waited.
  int64_t quiet_since(const Peer& peer) const;

 private:
  bool watched(const Peer& peer) const { return waiting_ns_ >= 0 && peer.lost_ns < 0 && peer.lane() != nullptr; }
  int64_t ping_after() const;
  int64_t patience(const Peer& peer) const;
  void ask(Peer* peer, int64_t now);
  void inspect(Peer* peer);

  Shared* const shared_;
  Poller* const poller_;
  Losses* const losses_;
  Outbox* const outbox_;
  int64_t waiting_ns_ = -1;   // since when the caller waits
  int64_t inspected_ns_ = 0;  // when the connections were looked at
};

}  // namespace bagua::mesh
