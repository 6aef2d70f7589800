// Connects the mesh of one communicator: waits for the addresses of the other hosts, then dials those with a higher
// number. The others dial this host (network.h).
//
// Several connections are made at the same time: each takes some round trips, and a generation waits for all of them. A
// host that is in the generation before is dialled again until it follows.
//
// Thread safety: the executor's thread only; it starts helpers, and joins them.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

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
  struct Call {
    int peer, stream;
    Status status;
  };

  bool await_peers(ExecutorInbox* inbox);
  // Makes calls of the list until none is left, or one has failed.
  void work(std::vector<Call>* calls, int64_t deadline_ns);
  Status dial(int peer, int stream, int64_t deadline_ns);
  bool worth_retrying(const Status& status) const;
  void give_up(const Call& call);

  GenerationState* const state_;
  const Network* const network_;
  const Communicator* const comm_;
  Mesh* const mesh_;
  std::atomic<size_t> next_{0};      // call to make
  std::atomic<bool> failed_{false};  // one of them
};

}  // namespace bagua
