// Small collectives among ranks of one host, without the daemon.
//
// Each rank copies what it brings into shared memory. The last one tells the others, and each rank makes its own result
// of all contributions. That saves a sleep, a wake-up and a context switch for each operation; on a busy machine these
// are most of its time. Of a long all-reduce each rank reduces one slice for all. Results have the same bits as the
// daemon's: the same kernel adds in the same order.
//
// A rank that has waited for MeetingWaits::patience_ns ends the meeting for all ranks, and so does a rank that sees
// that the calls differ. All then submit the operation to the daemon, which waits, compares the calls, and names the
// rank that is missing or wrong. A rank whose earlier operations the daemon still works at submits at once, and tells
// the others by stay_away(). A meeting is named by the number of the collective on the communicator, so ranks that
// took different ways are together again at the next one.
//
// MeetingRoom::verdict moves from one meeting to a later one by compare-and-swap: to kMet by a rank that sees the
// contributions of all ranks (all stores and loads are sequentially consistent, so at least the last rank does), or to
// kApart by a rank whose patience has ended. The swap that says kMet also writes the number into the high half, where
// it stays until the next meeting that all ranks come to. So a slow rank finds it however many meetings were ended
// since.
//
// A rank has two contributions in turn, and writes one again only when all others have left the meeting that it was
// for. After kMet no rank depends on another. A rank that dies or is stopped costs the others at most their patience.
// Then they reduce its slice by themselves. Before kMet the daemon knows that it is late, as with any other operation.
// A rank writes its slice only after all have come to this meeting, and so have left those before it.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

#include "base/mutex.h"
#include "base/status.h"
#include "channel/layout.h"

namespace bagua {

enum MeetingState : uint32_t { kMet = 1, kApart = 2 };

// How a rank waits.
struct MeetingWaits {
  int spins = 0;   // before it sleeps; 0 where ranks share cores
  int yields = 0;  // after the spins; 0 where each rank has a core
  int64_t patience_ns = 20'000'000;
};

class Meeting {
 public:
  using Usable = std::function<Status()>;
  using Interrupted = std::function<bool()>;

  // In a room of the page. This rank is number `own` of the communicator's `ranks`. One rank needs no room.
  Meeting(Counters* counters, GenerationPage* page, uint32_t room, uint32_t own, uint32_t ranks,
          const MeetingWaits& waits);

  // Wakes the ranks that wait in any room: they ask whether it is still usable.
  static void disturb(GenerationPage* page);
  // True if operations like this one are done in meetings. Every rank of the communicator answers alike.
  bool accepts(const Descriptor& descriptor) const;

  // Waits for the others; *met: dst has the result. Otherwise the operation goes to the daemon. `usable` and
  // `interrupted` are asked after each sleep; their error, or kAborted, is returned after the meeting has been ended.
  // `src`, `dst`: nullptr where this rank gives, or gets, nothing. One thread at a time; `number` grows.
  Status attend(uint32_t number, const Descriptor& descriptor, const char* src, char* dst, const Usable& usable,
                const Interrupted& interrupted, bool* met);

  // This rank does not come to that meeting, because it has submitted the operation: others need not wait for it.
  void stay_away(uint32_t number, const Descriptor& descriptor);

  // For its owner, which lets one thread in at a time.
  Mutex mutex;
  std::atomic<const void*> thread{nullptr};  // that is in a meeting: see this_thread()
  std::atomic<uint32_t> calls{0};            // collectives on the communicator, with and without the daemon
  // Waits until no other thread is in a meeting, so that the room may be given away.
  void await_end() {
    if (thread.load(std::memory_order_relaxed) != this_thread()) const Lock nobody(mutex);
  }
  // When this rank knew the end of its last meeting.
  int64_t met_ns() const { return met_ns_; }
  // An address that no other thread has.
  static const void* this_thread() {
    static thread_local const char address = 0;
    return &address;
  }

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
  char* vector(uint32_t rank, uint32_t number) const { return vectors_->brought[rank][which(rank, number)]; }
  bool everybody(uint32_t number) const;
  bool calls_agree(uint32_t number, const MeetingCall& own) const;
  // Makes this rank's result. `call`: a private copy, whatever others write to the seats.
  void make_result(uint32_t number, const MeetingCall& call, const char* const* brought, char* dst);
  void reduce_by_slices(uint32_t number, const MeetingCall& call, const char* const* brought, char* dst);
  bool await_slice(uint32_t rank, uint32_t number, int64_t patience);
  void decide(uint64_t seen, uint32_t number, MeetingState state);
  void add_to_counters(const MeetingCall& call, int64_t started);

  Counters* const counters_;
  MeetingRoom* const room_;
  MeetingVectors* const vectors_;
  const uint32_t own_, ranks_;
  const MeetingWaits waits_;
  int64_t usual_ns_ = 0;  // how long this rank usually waits: a running mean
  int64_t met_ns_ = 0;
};

}  // namespace bagua
