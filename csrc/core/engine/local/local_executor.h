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

// A span of its trace.
TraceSpan span_of(const Collective& operation, uint32_t comm, const char* phase, int64_t begin_ns, int64_t end_ns);
// Notes its "operation" span, and inside it "ranks": from the first local rank's submission to the last one's.
void note_operation(Trace* trace, const Collective& operation, uint32_t comm, int64_t done_ns);

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
