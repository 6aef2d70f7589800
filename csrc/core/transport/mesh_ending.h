// Shuts a mesh down: sends the last control messages, then closes its connections. See Mesh::retire(),
// hang_up() and shut_down().
//
// Thread safety: the thread that drives the mesh only.
#pragma once

#include "base/status.h"
#include "transport/mesh_connections.h"
#include "transport/mesh_poller.h"
#include "transport/mesh_shared.h"
#include "transport/mesh_watch.h"

namespace bagua::mesh {

class Ending {
 public:
  Ending(Shared* shared, Poller* poller, Connections* connections, Watch* watch)
      : shared_(shared), poller_(poller), connections_(connections), watch_(watch) {}

  void retire();
  void hang_up();
  void shut_down();
  // After hang_up(): closes this side of each lane whose messages are all written. After retire(): fails the mesh when
  // no lane is left.
  void settle();

 private:
  void end_lanes();

  Shared* const shared_;
  Poller* const poller_;
  Connections* const connections_;
  Watch* const watch_;
  bool hanging_up_ = false;
  Status cause_;  // the first error when the mesh was retired
};

// True if control messages can go to `peer` on its control lane.
bool can_tell(const Peer& peer);

}  // namespace bagua::mesh
