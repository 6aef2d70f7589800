// The collectives of one communicator that are in progress between hosts: several programs at once on one mesh.
//
// Thread safety: the executor's thread only.
//
// Each peer has one queue of sends and one of receives, in the order of the programs and, between programs, in the
// order of the collectives, which is the same at all hosts. Only the head of a queue is ever started: so the rule of
// collective/program.h holds across collectives, too. A receive also waits for the peer's own description of that
// collective, so that a mismatch is told in words before a byte is misplaced.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "collective/execute.h"
#include "engine/local/communicator.h"
#include "engine/local/generation_state.h"
#include "engine/remote/control.h"
#include "engine/values/residuals.h"
#include "engine/values/scratch_pool.h"
#include "transport/mesh.h"

namespace bagua {

class Exchange {
 public:
  Exchange(GenerationState* state, const Communicator* comm, Mesh* mesh);

  // The order in which rings and chains of this communicator go round its hosts (collective/program.h); the same at all
  // hosts, or the first collective says that it is not. Before the first collective has begun. kInvalid: no permutation
  // of the hosts.
  Status set_ring(std::vector<int> order);
  // Collectives do not begin until set_ring(). Before the first add().
  void await_ring() { ring_awaited_ = true; }
  bool ring_awaited() const { return ring_awaited_; }

  void add(Collective operation);
  // A peer's description. kInvalid names both sides if it is not what this host's ranks called.
  Status describe(int peer, const message::Describe& other);
  // Begins collectives and starts the sends and receives that may go.
  Status pump();
  // Runs one step that computes; false if none is ready.
  bool compute();
  // Mesh completions.
  void complete(uint64_t cookie);

  bool idle() const { return active_.empty() && queued_.empty(); }
  // Marks the hosts whose descriptions of collectives in progress have not come.
  void mark_awaited(std::vector<bool>* peers) const;
  bool computing() const { return !ready_.empty(); }
  // How many collectives some other host has begun.
  uint64_t begun_elsewhere() const { return begun_elsewhere_; }
  // Number of collectives that are done here, from the first one on.
  uint64_t done() const;
  // "all-reduce #4 of world": the oldest one in progress whose number is at least `from`; empty if there is none.
  std::string oldest(uint64_t from = 0) const;
  std::string describe_pending(int64_t now, int64_t before_ns) const;
  // Ends everything that is not done. The mesh must not be polled any more.
  void abandon();

 private:
  // Cookies have a serial in their upper half, but for the highest bit, which marks those of point-to-point operations.
  static constexpr uint32_t kSerials = 0x7fffffff;

  struct Active {
    uint32_t serial = 0;
    Collective operation;
    collective::Request request;
    collective::Program program;
    collective::Memory memory;
    ScratchPool::Block scratch;
    std::vector<uint32_t> waits_for;  // by step
    std::vector<bool> described;      // by peer
    size_t remaining = 0;             // steps
    std::vector<int64_t> begun;       // by step, when it was begun; empty: not traced
    int64_t activated_ns = 0;
  };
  struct Item {
    Active* active;
    uint32_t step;
  };

  Status activate(Collective operation);
  Status prepare(Active* active);
  bool may_begin(const Collective& operation) const;
  Status compare(int peer, const message::Describe& other, const Descriptor& own, int own_rank) const;
  void start_sends(int peer);
  void start_receives(int peer);
  void step_done(Active* active, uint32_t step);
  void finish(Active* active);
  // If it is traced: the step begins; it is over; peer has begun the operation.
  void trace_begin(const Item& item) const;
  void trace_step(const Active& active, uint32_t step) const;
  void trace_described(const Active& active, int peer) const;
  bool waiting(const Item& item) const { return item.active->waits_for[item.step] > 0; }

  GenerationState* const state_;
  const Communicator* const comm_;
  Mesh* const mesh_;
  const uint64_t members_digest_;
  collective::Topology topology_;  // of comm_, with the ring's order
  uint32_t ring_digest_ = 0;
  bool ring_awaited_ = false;
  ScratchPool scratch_;
  ResidualTable* const residuals_;

  std::deque<Collective> queued_;
  std::vector<std::unique_ptr<Active>> active_;     // in order
  std::vector<std::deque<Item>> sends_, receives_;  // by peer
  std::deque<Item> ready_;                          // steps that compute
  // The next one's serial: 1 to kSerials, then 1 again. It begins near the end, so that every test goes round.
  uint32_t next_serial_ = kSerials - 2;
  uint64_t begun_elsewhere_ = 0;
  uint64_t added_ = 0;  // collectives that add() was given
  // By peer: descriptions of collectives not begun here, by sequence.
  std::vector<std::map<uint64_t, message::Describe>> early_;
  struct Past {
    uint64_t sequence;
    Descriptor descriptor;
    int rank;
  };
  std::deque<Past> history_;  // the latest ones begun: a peer may describe one after it ended here
};

}  // namespace bagua
