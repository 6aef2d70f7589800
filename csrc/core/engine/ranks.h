// Table of the local ranks: their channels in shared memory, and whether they have joined, left or were lost.
//
// Thread safety: join() and set_phase() from the channel server's thread; the rest from any thread. A channel, once
// made, stays mapped until the engine is closed, so completing an operation of a rank that died is harmless.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/fd.h"
#include "base/status.h"
#include "channel/layout.h"
#include "channel/memory.h"
#include "engine/operation.h"

namespace bagua {

enum class Phase : int { kAbsent, kJoined, kLeft, kLost };

class RankTable {
 public:
  explicit RankTable(const std::vector<int>& ranks);

  size_t size() const { return ports_.size(); }
  int rank(size_t port) const { return ports_[port]->rank; }
  bool local(int rank) const { return find(rank) != nullptr; }
  Phase phase(int rank) const;
  // Makes the rank's channel; kInvalid if it has joined before. The descriptor stays the table's.
  Status join(int rank, pid_t pid, int* descriptor);
  void set_phase(int rank, Phase phase);
  // Unmaps all channels. Only when no thread takes or completes any more.
  void close();

  // The next submission of a rank that has not been taken; false if there is none. kCorrupt if the counters can't be
  // right. Dispatcher only.
  bool take(size_t port, Operation* out, Status* status);
  // Hands the result to the rank and wakes it. Any thread, once for each operation taken.
  void complete(const Operation& operation, int64_t started_ns, bool ok);
  // The same for many, all results before the first rank is woken: it may take this thread's core at once.
  void complete(const std::vector<Collective>& operations, bool ok);

 private:
  struct Port {
    int rank = -1;
    std::atomic<Phase> phase{Phase::kAbsent};
    std::atomic<RankChannel*> channel{nullptr};  // set once, after memory
    std::shared_ptr<Mapping> memory;
    Fd descriptor;
    uint64_t head = 0;                                 // dispatcher only: submissions taken
    std::unique_ptr<std::atomic<bool>[]> outstanding;  // by slot: taken and not completed
  };

  Port* find(int rank) const;
  // The futex to wake, if the rank sleeps there.
  std::atomic<uint32_t>* finish(const Operation& operation, int64_t started_ns, int64_t done_ns, bool ok);

  std::vector<std::unique_ptr<Port>> ports_;  // constant after construction
};

}  // namespace bagua
