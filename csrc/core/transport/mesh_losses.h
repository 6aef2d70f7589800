// Detects lost peers, and decides when a loss is an error.
//
// A peer is lost with the first of its streams that fails. What its other streams still hold is read first; the loss is
// an error only if something of that peer is still wanted then. See "Loss of a peer" in mesh.h.
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
  // Fails the mesh for peers that are lost and wanted. To be called when all streams were read.
  void settle();
  // When settle() is to be called again at the latest; -1: no time matters.
  int64_t deadline() const;

 private:
  void settle(Peer* peer);
  int64_t deadline(const Peer& peer) const;
  bool wanted(const Peer& peer) const;

  Shared* const shared_;
  Poller* const poller_;
};

}  // namespace bagua::mesh
