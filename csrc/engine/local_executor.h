// Runs operations whose members are all on this host: at once, on the dispatcher's thread, with the worker pool for
// large ones.
//
// Thread safety: the dispatcher's thread only.
#pragma once

#include "collective/execute.h"
#include "engine/communicator.h"
#include "engine/ranks.h"
#include "engine/state.h"
#include "engine/worker_pool.h"

namespace bagua {

// The request and memory of a collective, in the terms of collective/.
collective::Request request_of(const Collective& operation);
collective::Memory memory_of(const Collective& operation);

class LocalExecutor {
 public:
  LocalExecutor(EngineState* state, RankTable* ranks);

  // Runs it to the end and completes all parts.
  void run(const Communicator& comm, const Collective& operation);
  void run(const Pair& pair);

 private:
  EngineState* const state_;
  RankTable* const ranks_;
  const int threads_;
  WorkerPool pool_;
};

}  // namespace bagua
