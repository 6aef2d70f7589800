// Ends a communicator: sends the reason or a goodbye to the other hosts, and waits for theirs.
//
// The generation fails: tell the other hosts why, and give them a moment to hear it. The generation is ended: say so,
// and wait until nobody needs us any more (bounded). The communicator is destroyed here: say so, and keep the
// connections until it is destroyed on all other hosts: they may be far behind, still read what was sent before, or
// talk to each other. Another host has said either: what it has done is finished here, too; an operation that it has
// not done fails.
//
// Thread safety: the executor's thread only.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/local/communicator.h"
#include "engine/local/generation_state.h"
#include "engine/remote/departures.h"
#include "engine/remote/network.h"
#include "engine/remote/traffic.h"
#include "transport/mesh.h"

namespace bagua {

class Farewell {
 public:
  Farewell(GenerationState* state, const Network* network, const Communicator* comm, Mesh* mesh, Departures* departures,
           TrafficCount* traffic)
      : state_(state), network_(network), comm_(comm), mesh_(mesh), departures_(departures), traffic_(traffic) {}

  // The communicator is destroyed here, and all that its members called is done. Returns when it is so everywhere, or
  // when the generation has failed.
  void await_others();
  // The generation has ended in good order.
  void leave();
  // The generation is suspended: tells the others, and hangs up at once. They need no last words, they regroup, too.
  void report_loss();
  // The generation has failed. Also after the mesh has failed: the lanes that still work carry the cause. A host that
  // could not be told, or does not listen, loses its connections to us: nobody waits for us for ever.
  void report_failure();

 private:
  Status listen(int64_t deadline_ns);
  void hear(const Mesh::Completion& completion);
  void converse(int64_t deadline_ns);

  GenerationState* const state_;
  const Network* const network_;
  const Communicator* const comm_;
  Mesh* const mesh_;
  Departures* const departures_;
  TrafficCount* const traffic_;
  std::vector<Mesh::Completion> completions_;
};

}  // namespace bagua
