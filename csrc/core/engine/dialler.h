// Connects the mesh of one communicator: waits for the addresses of the other hosts, then dials those with a higher
// number. The others dial this host (network.h).
//
// Thread safety: the executor's thread only.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "engine/communicator.h"
#include "engine/executor_inbox.h"
#include "engine/generation_state.h"
#include "engine/network.h"
#include "transport/mesh.h"

namespace bagua {

class Dialler {
 public:
  Dialler(GenerationState* state, const Network* network, const Communicator* comm, Mesh* mesh)
      : state_(state), network_(network), comm_(comm), mesh_(mesh) {}

  // True when all streams to the hosts that this one dials are attached. False: the generation has failed, or the inbox
  // is closing and nobody needs them.
  bool connect(ExecutorInbox* inbox);

 private:
  bool await_peers(ExecutorInbox* inbox);
  Status dial(int peer, int stream, int64_t deadline_ns);

  GenerationState* const state_;
  const Network* const network_;
  const Communicator* const comm_;
  Mesh* const mesh_;
};

}  // namespace bagua
