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
  void abort(const std::string& reason) { state_.abort(reason); }
  void lose(const Loss& loss) { state_.lose(loss); }
  // The next one follows.
  void retire(const std::string& reason) { state_.retire(reason); }
  // A member of this host does nothing more.
  void await_no_more(int member) { state_.await_no_more(membership().rank_of(member)); }
  std::string error() const { return state_.error(); }
  std::string why() const { return state_.why(); }  // it has ended
  bool lost() const { return state_.lost(); }
  int64_t step_ns() const { return state_.step_ns(); }
  // Lines about operations that have waited for longer than that.
  std::string waiting(int64_t longer_than_ns);

  // A local member declares or destroys a communicator; see Registry.
  Status declare(int member, uint64_t comm, const std::vector<int>& ranks);
  Status destroy(int member, uint64_t comm);
  // Takes what a local member has submitted: its operations hold their memory from then on.
  void take_submitted(int member);

  // Every operation fails with the reason from now on; other hosts are told that this one leaves in good order.
  void end(const std::string& reason) { state_.end(reason); }
  // After end() or retire(): joins all threads and lets go of the network. The job's parts stay as they are.
  // Idempotent.
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
