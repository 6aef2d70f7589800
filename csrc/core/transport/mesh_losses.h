// Detects lost peers, and decides when a loss is an error.
//
// A peer is lost when the first of its streams fails. The mesh reads its other streams first; then the loss is an error
// only if a message of that peer is still needed. See "Loss of a peer" in mesh.h.
//
// Thread safety: the thread that drives the mesh only.
#pragma once

#include <cstdint>
#include <string>

#include "transport/mesh_poller.h"
#include "transport/mesh_shared.h"

namespace bagua::mesh {

class Losses {
 public:
  Losses(Shared* shared, Poller* poller) : shared_(shared), poller_(poller) {}

  // A stream of the peer has ended or broken.
  void lose(Stream* failed, const std::string& how);
  // Fails the mesh if a lost peer is still needed. Call it when all streams have been read.
  void settle();
  // When settle() must be called again at the latest; -1: no limit.
  int64_t deadline() const;

 private:
  void settle(Peer* peer);
  int64_t deadline(const Peer& peer) const;
  bool wanted(const Peer& peer) const;

  Shared* const shared_;
  Poller* const poller_;
};

}  // namespace bagua::mesh
