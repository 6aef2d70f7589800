// Small all-reduces among the ranks of one host, without the daemon.
//
// Each rank copies its vector into shared memory. The last one wakes the others with one call, and each rank reduces
// all vectors into its own result. That saves a sleep, a wake-up and a context switch for each operation; on a busy
// machine these are most of its time. The result has the same bits as the daemon's: the same kernel adds in the same
// order.
//
// A rank that has waited for kPatienceNs ends the meeting for all ranks, and so does a rank that sees that the calls
// differ. All then submit the operation to the daemon, which waits, compares the calls, and names the rank that is
// missing or wrong. Each communicator of all ranks has a room of its own. A meeting is named by the number of the
// collective on the communicator, so ranks that took different ways are together again at the next one.
//
// MeetingRoom::verdict moves from one meeting to a later one by compare-and-swap: to kMet by a rank that sees the
// contributions of all ranks (all stores and loads are sequentially consistent, so at least the last rank does), or to
// kApart by a rank whose patience has ended. The swap that says kMet also writes the number into the high half, where
// it stays until the next meeting that all ranks come to. So a slow rank finds it however many meetings were ended
// since.
//
// A rank has two contributions in turn, and writes one again only when all others have left the meeting that it was
// for. No rank works for another: one that dies or is stopped, at any instruction, costs the others kPatienceNs; then
// the daemon knows it is late, as with any other operation.
#pragma once

#include <cstdint>
#include <functional>

#include "base/status.h"
#include "channel/layout.h"

namespace bagua {

enum MeetingState : uint32_t { kMet = 1, kApart = 2 };

class Meeting {
 public:
  using Usable = std::function<Status()>;
  using Interrupted = std::function<bool()>;
  static constexpr int64_t kPatienceNs = 20'000'000;

  // In the room of communicator `comm`, one of the first kMeetingComms. This rank sits at `own` of `ranks` seats.
  Meeting(Counters* counters, GenerationPage* page, uint32_t comm, uint32_t own, uint32_t ranks, int spins,
          int64_t patience_ns = kPatienceNs);

  // Wakes the ranks that wait in any room: they ask whether it is still usable.
  static void disturb(GenerationPage* page);
  // Whether operations like this one are done in meetings of so many ranks, if these are all of the communicator: every
  // rank answers alike.
  static bool takes(const Descriptor& descriptor, uint32_t ranks);

  // Waits for the others; *met: dst has the result. Otherwise the operation goes to the daemon. `usable` and
  // `interrupted` are asked after each sleep; their error, or kAborted, is returned after the meeting has been ended.
  // One thread at a time; `number` grows.
  Status attend(uint32_t number, const Descriptor& descriptor, const char* src, char* dst, const Usable& usable,
                const Interrupted& interrupted, bool* met);

 private:
  // False: a rank still reads what would be overwritten, and nothing was written.
  bool contribute(uint32_t number, const MeetingCall& call, const char* src);
  Status await(uint32_t number, const MeetingCall& call, bool contributed, const Usable& usable,
               const Interrupted& interrupted, bool* met);
  // Which of the rank's contributions is for this meeting; any if none is.
  uint32_t which(uint32_t rank, uint32_t number) const;
  const Contribution& contribution(uint32_t rank, uint32_t number) const {
    return room_->seats[rank].contributions[which(rank, number)];
  }
  char* vector(uint32_t rank, uint32_t which) const { return vectors_ + (2 * rank + which) * bytes_; }
  bool everybody(uint32_t number) const;
  bool calls_agree(uint32_t number, const MeetingCall& own) const;
  // `call`: a private copy, whatever others write to the seats.
  void reduce_all(uint32_t number, const MeetingCall& call, char* dst);
  void decide(uint64_t seen, uint32_t number, MeetingState state);
  void sleep(uint64_t seen, int64_t deadline_ns);

  Counters* const counters_;
  MeetingRoom* const room_;
  const size_t bytes_;   // of a vector
  char* const vectors_;  // in MeetingVectors
  const uint32_t own_, ranks_;
  const int spins_;
  const int64_t patience_ns_;
};

}  // namespace bagua
