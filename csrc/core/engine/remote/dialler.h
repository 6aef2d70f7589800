// Connects the mesh of one communicator: waits for the addresses of the other hosts, then dials those with a higher
// number. The others dial this host (network.h). The executor serves the mesh meanwhile: a host that dials one that is
// gone must not look gone itself.
//
// Several connections are made at the same time: each takes some round trips, and a generation waits for all of them. A
// host that is in the generation before is dialled again until it follows, and so is one that has no room yet for more
// connections of communicators that it has not made.
//
// Thread safety: the executor's thread only. It starts helpers, which make the connections, and cancels and joins them.
#pragma once

#include <atomic>
#include <cstdint>
#include <set>
#include <thread>
#include <vector>

#include "base/fd.h"
#include "base/mutex.h"
#include "base/status.h"
#include "engine/local/communicator.h"
#include "engine/local/generation_state.h"
#include "engine/remote/executor_inbox.h"
#include "engine/remote/network.h"
#include "transport/handshake.h"
#include "transport/mesh.h"
#include "transport/seal.h"

namespace bagua {

class Dialler {
 public:
  Dialler(GenerationState* state, const Network* network, const Communicator* comm, Mesh* mesh)
      : state_(state), network_(network), comm_(comm), mesh_(mesh) {}

  // Starts dialling when the addresses are known. False: the generation has failed before.
  bool begin(ExecutorInbox* inbox);
  // A host can't be reached: why, and whether that may be otherwise in the next generation.
  bool refused() const { return refused_ != nullptr; }
  // All streams to the hosts that this one dials are attached.
  bool done() const { return left_ == 0; }
  Loss loss() const;
  bool may_pass() const;
  void end();

 private:
  struct Call {
    int peer, stream;
    Status status = {};
  };

  bool await_peers(ExecutorInbox* inbox);
  // A helper: makes calls until none is left, or one has failed.
  void work(int64_t deadline_ns);
  Status dial(int peer, int stream, int64_t deadline_ns);
  Status shake_hands(Connection* connection, const PeerInfo& me, const DialDeadlines& deadlines);
  bool worth_retrying(const Status& status) const;

  GenerationState* const state_;
  const Network* const network_;
  const Communicator* const comm_;
  Mesh* const mesh_;
  EventFd stop_;
  std::vector<std::thread> helpers_;
  std::vector<Call> calls_;
  std::atomic<size_t> next_{0};                // call to make
  std::atomic<size_t> left_{0};                // calls
  std::atomic<bool> failed_{false};            // a call; or nobody needs them any more
  std::atomic<const Call*> refused_{nullptr};  // the first call that failed
  Mutex mutex_;
  std::set<int> shaking_ GUARDED_BY(mutex_);  // sockets on which a helper waits for the other end's words
};

}  // namespace bagua
