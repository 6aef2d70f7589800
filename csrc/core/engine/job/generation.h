// One generation of a job on this host: its members, its communicators and their threads, its network, its first error.
// A change of membership replaces all of this; what stays is in JobState.
//
// Thread safety: any thread, but open() and close() belong to the owner. Threads: the dispatcher and its worker
// helpers; with several hosts also the network's acceptor and one executor for each communicator that spans hosts.
// close() ends all of them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/job/dispatcher.h"
#include "engine/job/registry.h"
#include "engine/local/generation_state.h"
#include "engine/remote/network.h"

namespace bagua {

class Generation {
 public:
  // `job` must outlive it. `last`: the generation before, which is closed; nullptr: there was none.
  Generation(JobState* job, Membership membership, const Generation* last);
  ~Generation() { close(); }
  Generation(const Generation&) = delete;
  Generation& operator=(const Generation&) = delete;

  // Makes the ranks' page and the world, starts the threads.
  Status open();
  Status set_peers(const std::vector<std::string>& addresses);

  const Membership& membership() const { return state_.membership(); }
  // Descriptor of the page that its ranks map.
  int page() const { return state_.sheet().descriptor(); }
  GenerationState& state() { return state_; }
  // Lines about operations that have waited for longer than that.
  std::string waiting(int64_t longer_than_ns);

  // A local member declares or destroys a communicator; see Registry.
  Status declare(int member, uint64_t comm, const std::vector<int>& ranks, uint32_t* room);
  Status destroy(int member, uint64_t comm);
  // Takes what a local member has submitted: its operations hold their memory from then on.
  void take_submitted(int member);

  // After end() or retire() of its state: joins all threads and lets go of the network. The job's parts stay as they
  // are. Idempotent.
  void close();

 private:
  void prepare(Communicator* comm);
  Status check(int member, int* rank) const;
  void drop(const std::shared_ptr<Communicator>& comm);
  void close_executors();

  GenerationState state_;
  Network network_;
  Registry registry_;
  Dispatcher dispatcher_;
};

}  // namespace bagua
