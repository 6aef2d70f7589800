// Table of the local members: their channels in shared memory, and whether they have joined, left or were lost.
//
// Thread safety: any thread; mutex_ guards the list. A Port stays, with its channel mapped, until regroup(), when no
// thread takes or completes operations any more; so completing an operation of a member that died is harmless.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/fd.h"
#include "base/mutex.h"
#include "base/status.h"
#include "channel/layout.h"
#include "channel/memory.h"
#include "engine/local/operation.h"
#include "engine/values/options.h"

namespace bagua {

enum class Phase : int { kAbsent, kJoined, kLeft, kLost };

// How an operation that was taken ends.
enum class Outcome : uint32_t {
  kDone = SlotState::kDone,
  kFailed = SlotState::kFailed,
  kRegrouped = SlotState::kRegrouped
};

// The end of one member's channel.
struct Port {
  int member = -1;
  std::vector<uint8_t> token;
  std::atomic<Phase> phase{Phase::kAbsent};
  std::string farewell;  // of kLeft, set before it: what it was handling then
  std::atomic<pid_t> pid{0};
  std::atomic<RankChannel*> channel{nullptr};  // set once, after memory
  std::shared_ptr<Mapping> memory;
  Fd descriptor;
  uint64_t head = 0;                                 // dispatcher only: submissions taken
  std::unique_ptr<std::atomic<bool>[]> outstanding;  // by slot: taken and not completed
};

class RankTable {
 public:
  // A generation begins with these local members, while none runs: makes ports for new ones, with their tokens. Returns
  // the members that are not in it any more, whose ports go when no generation has them.
  std::vector<int> regroup(const std::vector<int>& members, const Tokens& tokens);
  // Returns the ports of these members, in this order.
  std::vector<std::shared_ptr<Port>> ports(const std::vector<int>& members) const;

  Phase phase(int member) const;
  // Makes the member's channel. kInvalid in words: it is unknown, the token is wrong, or it has joined before.
  Status join(uint32_t member, const uint8_t* token, pid_t pid, Fd* descriptor);
  pid_t pid(int member) const;  // 0: it has not joined
  // False: it is unknown. `words`: see Port::farewell.
  bool set_phase(int member, Phase phase, const std::string& words = "");

  // The next submission that has not been taken; false if there is none. kCorrupt if the counters can't be right:
  // "wrote a ...". Dispatcher only.
  static bool take(Port* port, Operation* out, Status* status);
  // The rank has submitted operations that are not over, taken or not. Any thread.
  static bool is_busy(const Port& port);
  // Hands the result to the rank and wakes it. Any thread, once for each operation taken.
  static void complete(const Operation& operation, int64_t started_ns, Outcome outcome);
  // The same for many that are done, all results before the first rank is woken: it may take this thread's core at
  // once.
  static void complete(const std::vector<Collective>& operations);

 private:
  std::shared_ptr<Port> find(int member) const REQUIRES(mutex_);
  // The futex to wake, if the rank sleeps there.
  static std::atomic<uint32_t>* finish(const Operation& operation, int64_t started_ns, int64_t done_ns,
                                       Outcome outcome);

  mutable Mutex mutex_;
  std::vector<std::shared_ptr<Port>> ports_ GUARDED_BY(mutex_);
};

}  // namespace bagua
