// The work of a communicator that spans hosts: operations come from the inbox, run over the mesh, and are completed.
//
// Thread safety: the executor's thread only, but begun_elsewhere().
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "engine/local/communicator.h"
#include "engine/local/generation_state.h"
#include "engine/remote/control.h"
#include "engine/remote/departures.h"
#include "engine/remote/exchange.h"
#include "engine/remote/executor_inbox.h"
#include "engine/remote/inquiry.h"
#include "engine/remote/p2p.h"
#include "engine/remote/ring_survey.h"
#include "engine/remote/traffic.h"
#include "transport/mesh.h"

namespace bagua {

// Parts that the loop drives. They belong to the executor.
struct HostParts {
  Mesh* mesh;
  ExecutorInbox* inbox;
  Inquiry* inquiry;
  Exchange* exchange;
  PointToPoint* p2p;
  RingSurvey* survey;
  Departures* departures;
  TrafficCount* traffic;
};

class HostLoop {
 public:
  HostLoop(GenerationState* state, const Communicator* comm, const HostParts& parts)
      : state_(state), comm_(comm), parts_(parts) {}

  // Returns when the generation has failed, or the inbox is closing and all is done.
  void serve();
  // How many collectives some other host has begun. Any thread.
  uint64_t begun_elsewhere() const { return begun_elsewhere_.load(std::memory_order_acquire); }

 private:
  bool idle() const { return parts_.exchange->idle() && parts_.p2p->idle(); }
  Status turn();
  void take_inbox();
  Status settle_ring();
  void follow_step();
  void tell_mesh_what_we_await();
  int64_t next_deadline() const;
  Status network_failed(const Status& status) const;
  int lost_host() const;  // whose loss failed the mesh; -1: none
  Status on_completion(const Mesh::Completion& completion);
  Status on_control(int peer, const Control& control);
  Status on_describe(int peer, const message::Describe& other);
  std::string describe(int64_t before_ns) const;

  GenerationState* const state_;
  const Communicator* const comm_;
  const HostParts parts_;
  int64_t progress_ns_ = 0;    // when something arrived last
  int64_t step_ns_ = 0;        // that the limits of silence follow
  std::vector<bool> awaited_;  // by peer: a word from it is needed; kept for its memory
  std::vector<Mesh::Completion> completions_;
  std::atomic<uint64_t> begun_elsewhere_{0};
};

}  // namespace bagua
