// Matching: what the local members of one communicator submitted, until an operation is complete on this host.
//
// Thread safety: any thread; mutex_ guards the queues. The dispatcher pushes and takes, waiting() reads, the channel
// server's thread declares and destroys. Nothing here blocks.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "base/mutex.h"
#include "collective/program.h"
#include "engine/local/operation.h"

namespace bagua {

class HostExecutor;

// A send and its recv.
struct Pair {
  Operation send, recv;
};

// One half of a send and recv between hosts.
struct SendOrRecv {
  Operation operation;
  int source = -1, destination = -1;  // indices in the communicator
  uint64_t sequence = 0;              // of this source and destination, for people
  uint64_t message = 0;               // its number on the wire among those of source and destination; the receiver's
};

class Communicator {
 public:
  using Route = std::tuple<int, int, uint32_t>;  // source, destination, tag
  using Target = std::pair<int, uint32_t>;       // destination, tag
  // A half; or a local member and a tag of whose sends other hosts have to tell, from the receives after it on: it
  // receives from any source.
  using Between = std::variant<SendOrRecv, Target>;

  // `hosts`: ranks of every host of the job. Members are sorted global ranks, at least one of them on host
  // `host_index`.
  // `incarnation`: how many communicators with this number and these members this host has had before.
  Communicator(uint32_t id, std::vector<int> members, const std::vector<std::vector<int>>& hosts, int host_index,
               uint32_t incarnation = 0);

  uint32_t id() const { return id_; }
  // Tells this communicator from others with its number: a digest of the members and the incarnation. The same at all
  // hosts, as all of them make and destroy their communicators in the same order.
  uint64_t instance() const { return instance_; }
  // Whether an instance has the same members.
  static bool same_members(uint64_t a, uint64_t b) { return a >> 32 == b >> 32; }
  int size() const { return static_cast<int>(members_.size()); }
  const std::vector<int>& members() const { return members_; }      // global ranks
  const std::vector<int>& job_hosts() const { return job_hosts_; }  // of topology().members[i]: index in the job
  const collective::Topology& topology() const { return topology_; }
  int hosts() const { return topology_.hosts(); }
  // "host 1 (ranks 2, 3)", for people, who know the hosts of the job and their ranks; `host` as in topology().
  const std::string& host_text(int host) const { return host_names_[static_cast<size_t>(host)]; }
  int index_of(int rank) const;  // -1: not a member
  int rank_of(int index) const { return members_[static_cast<size_t>(index)]; }
  const std::vector<int>& local_ranks() const { return local_ranks_; }

  // Takes one checked operation of a local member.
  void push(Operation operation);
  // The next operation that all local members have submitted; false if there is none. kInvalid: they do not fit
  // together.
  bool next_collective(Collective* out, Status* mismatch);
  // The next send and recv between two local members.
  bool next_pair(Pair* out, Status* mismatch);
  // The next for other hosts. They must hear of them in this order.
  bool next_between(Between* out);
  // Another host has called `sends` sends of this route, of those that belong to receives after the target's seek. The
  // receive from any source that takes the next of them; false if there is none.
  bool take_offered(const Route& route, uint64_t sends, SendOrRecv* out);
  // Whether a receive from any source waits. Any thread.
  bool awaits_any() const { return awaits_any_.load(std::memory_order_relaxed); }
  // Takes out everything that waits.
  std::vector<Operation> drain();

  // Names an operation that waits for local rank `rank`, which has nothing more to come; empty if none does. The other
  // hosts have begun `remote` collectives.
  std::string needs(int rank, uint64_t remote) const;
  // Local ranks without which the operation `mine`, that local rank `rank` has submitted and waits for, does not begin;
  // `name`: the name of the one that waits for them, which may be an earlier one. Empty: there are none.
  std::vector<int> awaited(int rank, const Descriptor& mine, std::string* name) const;
  // Lines about operations that have waited since before `before_ns`.
  std::string describe(int64_t now, int64_t before_ns) const;

 private:
  friend struct Remembered;  // of a test

  // Operations that wait, of one route whose ends are both here. Programs may take a new tag for every message: nothing
  // is kept of a route when nothing waits.
  struct Lane {
    std::deque<Operation> sends, recvs;
  };
  using Lanes = std::map<int, Lane>;  // by source
  // Counts of a route whose target seeks, since then.
  struct Sought {
    uint64_t offered = 0;  // sends of which the other host has told
    uint64_t posted = 0;   // receives
  };

  // The next pair of these.
  bool pair_of(const Target& target, Lanes* lanes, Pair* out) REQUIRES(mutex_);
  int member_of(int rank) const;  // position among the local members
  // Takes out the receive that the next send of this lane belongs to: the first that was posted; false: there is none.
  bool take_recv(const Target& target, int source, Lane* lane, Operation* out) REQUIRES(mutex_);
  // Pairs matched so far.
  uint64_t pairs_of(int source, int destination) const REQUIRES(mutex_);
  // `operation` as the next send or receive of this route, whose other end is on another host.
  SendOrRecv half_of(Operation operation, const Route& route) REQUIRES(mutex_);
  // Takes a send that another host has offered to this target, or waits.
  void push_from_any(Operation operation) REQUIRES(mutex_);
  Operation pop_from_any(std::map<Target, std::deque<Operation>>::iterator any) REQUIRES(mutex_);
  std::vector<int> awaited_collective(int rank, std::string* name) const REQUIRES(mutex_);
  std::string describe_collectives(int64_t now, int64_t before_ns) const REQUIRES(mutex_);
  std::string describe_lanes(int64_t now, int64_t before_ns) const REQUIRES(mutex_);

  const uint32_t id_;
  const uint64_t instance_;
  const std::vector<int> members_;
  std::vector<int> job_hosts_;  // constant after construction, like the next three
  std::vector<std::string> host_names_;
  collective::Topology topology_;
  std::vector<int> local_ranks_;

  mutable Mutex mutex_;
  std::vector<std::deque<Operation>> queues_ GUARDED_BY(mutex_);  // collectives, by local member
  uint64_t sequence_ GUARDED_BY(mutex_) = 0;
  std::map<Target, Lanes> lanes_ GUARDED_BY(mutex_);                     // both ends here; those where something waits
  std::map<Target, std::deque<Operation>> from_any_ GUARDED_BY(mutex_);  // receives from any source
  uint64_t arrived_ GUARDED_BY(mutex_) = 0;                              // into the last two
  std::set<Target> touched_ GUARDED_BY(mutex_);                          // of them: next_pair() has to look
  std::map<std::pair<int, int>, uint64_t> pairs_ GUARDED_BY(mutex_);     // by source and destination: see pairs_of()
  std::deque<Between> between_ GUARDED_BY(mutex_);
  std::map<std::pair<int, int>, uint64_t> halves_ GUARDED_BY(mutex_);  // the same of other hosts: so far
  std::map<Target, std::map<int, Sought>> sought_ GUARDED_BY(mutex_);  // by source
  std::atomic<bool> awaits_any_{false};

 public:
  // The room of the generation's page in which its members meet (channel/meeting.h); 0: they don't. Set once, before
  // anybody can use it.
  uint32_t room = 0;
  // Multi-host communicators: runs what next_collective() and next_between() gave. Set once, before the first push().
  // The last member, so that its thread, which reads the others, ends first.
  std::shared_ptr<HostExecutor> executor;
};

}  // namespace bagua
