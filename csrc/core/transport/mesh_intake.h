// Incoming messages: matches frames with posted receives.
//
// Thread safety: the thread that drives the mesh only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "transport/mesh_losses.h"
#include "transport/mesh_outbox.h"
#include "transport/mesh_poller.h"
#include "transport/mesh_shared.h"

namespace bagua::mesh {

class Intake {
 public:
  Intake(Shared* shared, Poller* poller, Losses* losses, Outbox* outbox)
      : shared_(shared), poller_(poller), losses_(losses), outbox_(outbox) {}

  // Posts a receive from host `peer`. If its frame is parked, reading continues.
  void post(int peer, MessageKey key, Posted receive);
  // Reads a stream until it is empty or has used up its turn.
  void read(Stream* stream);

 private:
  bool on_header(Stream* stream);
  bool drop_foreign(Stream* stream);
  bool claim(Stream* stream);
  void on_payload(Stream* stream);
  void on_corrupt(Stream* stream);

  Shared* const shared_;
  Poller* const poller_;
  Losses* const losses_;
  Outbox* const outbox_;  // for the answers to pings
};

}  // namespace bagua::mesh
