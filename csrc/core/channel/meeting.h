// Small all-reduces among the ranks of one host, without the daemon.
//
// Each rank copies its vector into shared memory. The last one reduces all vectors into one result and wakes the others
// with one call; each copies the result. That saves a sleep, a wake-up and a context switch for each operation; on a
// busy machine these are most of its time. The result has the same bits as the daemon's: the same kernel adds in the
// same order.
//
// A rank that has waited for kPatienceNs ends the meeting for all ranks, and so does the last one if the calls differ.
// All then submit the operation to the daemon, which waits, compares the calls, and names the rank that is missing or
// wrong. A meeting is named by the number of the collective on the communicator of all ranks, so ranks that
// took different ways are together again at the next one.
//
// MeetingRoom::verdict moves from one meeting to a later one by compare-and-swap: to kRunning by one of those who see
// everybody's number (all stores and loads are sequentially consistent, so at least the last one does), or to kApart by
// one whose patience has ended. A seat and the result are used again only by those who have come to a later meeting,
// and whoever has come there has taken the earlier result: until then MeetingRoom::met names it. A rank that dies while
// it reduces is the daemon's to notice.
#pragma once

#include <cstdint>
#include <functional>

#include "base/status.h"
#include "channel/layout.h"

namespace bagua {

enum MeetingState : uint32_t { kRunning = 1, kMet = 2, kApart = 3 };

class Meeting {
 public:
  static constexpr int64_t kPatienceNs = 20'000'000;

  // This rank sits at `own` of `ranks` seats.
  Meeting(JobPage* page, uint32_t own, uint32_t ranks, int spins, int64_t patience_ns = kPatienceNs)
      : page_(page), room_(&page->room), own_(own), ranks_(ranks), spins_(spins), patience_ns_(patience_ns) {}

  // Whether operations like this one are done here: every rank answers alike.
  static bool takes(const Descriptor& descriptor);

  // Waits for the others; *met: dst has the result. Otherwise the operation goes to the daemon. `usable` and
  // `interrupted` are asked now and then; their error, or kAborted, is returned after the meeting has been ended.
  // One thread at a time; `number` grows.
  Status attend(uint32_t number, const Descriptor& descriptor, const char* src, char* dst,
                const std::function<Status()>& usable, const std::function<bool()>& interrupted, bool* met);

 private:
  bool everybody(uint32_t number) const;
  bool calls_agree(const MeetingCall& own) const;
  // For the one who has set the verdict kRunning. `call`: a private copy, whatever others write to the seats.
  void reduce_all(uint32_t number, const MeetingCall& call);
  void decide(uint32_t verdict);
  void sleep(uint32_t seen, int64_t deadline_ns);

  JobPage* const page_;
  MeetingRoom* const room_;
  const uint32_t own_, ranks_;
  const int spins_;
  const int64_t patience_ns_;
};

}  // namespace bagua
