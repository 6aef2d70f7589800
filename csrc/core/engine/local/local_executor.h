// Runs operations whose members are all on this host: at once, on the dispatcher's thread, with the worker pool for
// large ones.
//
// Thread safety: the dispatcher's thread only.
#pragma once

#include "collective/execute.h"
#include "engine/local/communicator.h"
#include "engine/local/generation_state.h"
#include "engine/values/worker_pool.h"

namespace bagua {

// The request and memory of a collective, in the terms of collective/.
collective::Request request_of(const Collective& operation);
collective::Memory memory_of(const Collective& operation);

// `next` does with the memory right behind that of `last` what `last` does with its own: both can be one operation.
// Large tensors come in pieces, and ranks may be pieces ahead.
bool continues(const Collective& last, const Collective& next);

class LocalExecutor {
 public:
  explicit LocalExecutor(GenerationState* state);

  // Runs a run of operations, each of which continues() the one before, to the end, and completes all their parts.
  void run(const Communicator& comm, const std::vector<Collective>& operations);
  void run(const Pair& pair);

 private:
  JobState* const job_;
  const int threads_;
  WorkerPool pool_;
};

}  // namespace bagua
