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

#include "engine/dispatcher.h"
#include "engine/generation_state.h"
#include "engine/network.h"
#include "engine/registry.h"

namespace bagua {

class Generation {
 public:
  // `job` must outlive it.
  Generation(JobState* job, Membership membership);
  ~Generation() { close(); }
  Generation(const Generation&) = delete;
  Generation& operator=(const Generation&) = delete;

  // Begins on the ranks' page, makes the world, starts the threads. The generation before must be closed.
  Status open();
  Status set_peers(const std::vector<std::string>& addresses);

  const Membership& membership() const { return state_.membership(); }
  void fail(const std::string& reason) { state_.fail(reason); }
  bool failed() const { return state_.failed(); }
  std::string error() const { return state_.error(); }
  // Lines about operations that have waited for longer than that.
  std::string waiting(int64_t longer_than_ns);

  // A rank declares or destroys a communicator; see Registry.
  Status declare(int rank, uint64_t comm, const std::vector<int>& members);
  Status destroy(int rank, uint64_t comm);

  // Every operation fails with the reason from now on; other hosts are told that this one leaves in good order.
  void end(const std::string& reason) { state_.end(reason); }
  // After end(): joins all threads and lets go of the network. The job's parts stay as they are. Idempotent.
  void close();

 private:
  void prepare(Communicator* comm);
  void retire(const std::shared_ptr<Communicator>& comm);
  void close_executors();

  GenerationState state_;
  Network network_;
  Registry registry_;
  Dispatcher dispatcher_;
};

}  // namespace bagua
