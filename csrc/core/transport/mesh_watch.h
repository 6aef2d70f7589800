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
  // A peer is pinged after at most this long a silence.
  static constexpr int64_t kPingAfterNs = 1'000'000'000;

  Watch(Shared* shared, Poller* poller, Losses* losses, Outbox* outbox)
      : shared_(shared),
        poller_(poller),
        losses_(losses),
        outbox_(outbox),
        silence_ns_(shared->options.silence_timeout_ns),
        first_word_ns_(shared->options.first_word_timeout_ns) {}

  // Says whether the caller waits for other hosts.
  void set_waiting(bool waiting);
  // For the answer to a ping, from now on.
  void set_silence_timeout(int64_t ns) { silence_ns_ = ns; }
  // The same for a peer from which nothing has come yet.
  void set_first_word_timeout(int64_t ns) { first_word_ns_ = ns; }
  // Pings silent peers, fails the mesh if one does not answer, and inspects connections.
  void look();
  // When look() must be called again at the latest; -1: no limit.
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
  int64_t silence_ns_;
  int64_t first_word_ns_;
  int64_t waiting_ns_ = -1;   // since when the caller waits
  int64_t inspected_ns_ = 0;  // when the connections were inspected
};

}  // namespace bagua::mesh
