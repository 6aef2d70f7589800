// A model of channel/meeting.h: all interleavings of two ranks in four meetings, and of three in one or two, under
// sequential consistency. Each read and write of shared memory is a step, and so are sleeping and waking. All must come
// to one outcome, nobody may read bytes of another meeting, and nobody may sleep for ever. Calls that differ,
// interrupts and numbers that wrap around are not in it.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <type_traits>
#include <unordered_set>
#include <vector>

#include "harness.h"

namespace bagua {
namespace {

enum class At : uint8_t {
  kBegin,      // contribute(): which contribution is older
  kLeft,       // have all left its meeting
  kWrite,      // the vector
  kNumber,     // and its number
  kLook,       // await(): the verdict
  kEverybody,  // who has come
  kMeet,       // swaps the verdict
  kPart,
  kWake,
  kSleepers,  // before it sleeps
  kCheck,
  kFutex,
  kSleeping,
  kAwake,
  kTake,   // take_slices(): reads the vectors
  kSlice,  // writes its slice
  kReduced,
  kSlices,
  kWakeForSlices,
  kAwaitSlice,
  kSliceSeen,
  kSliceSleepers,
  kSliceCheck,
  kSliceFutex,
  kSliceSleeping,
  kSliceAwake,
  kCopySlice,
  kReduceSlice,
  kLeave,
  kDone
};

constexpr int kMostRanks = 3, kMostMeetings = 4;
enum Outcome : uint8_t { kNone, kTogether, kByTheDaemon };

// Bytes alone: a state is its own key.
struct Verdict {
  uint8_t met, number, apart;
  bool operator==(const Verdict& other) const {
    return met == other.met && number == other.number && apart == other.apart;
  }
};
struct SeatModel {
  uint8_t left, reduced, number[2], vector[2], slice;
};
struct RankModel {
  At at;
  uint8_t meeting, i, slot, contributed, seen_slices;
  Verdict seen;
  Outcome outcomes[kMostMeetings + 1];
};
struct State {
  Verdict verdict;
  uint8_t sleepers, slices, slice_sleepers;
  SeatModel seats[kMostRanks];
  RankModel ranks[kMostRanks];
};
static_assert(std::has_unique_object_representations_v<State>);

struct Search {
  const int ranks, meetings;
  const bool impatient;  // a rank may end its patience at any time
  std::unordered_set<std::string> seen{};
  std::vector<State> work{};
  size_t ends = 0, together = 0;

  void add(const State& state) {
    if (seen.emplace(reinterpret_cast<const char*>(&state), sizeof state).second) work.push_back(state);
  }

  void run() {
    State first{};
    for (int r = 0; r < ranks; ++r) first.ranks[r].meeting = 1;
    add(first);
    while (!work.empty()) {
      const State state = work.back();
      work.pop_back();
      bool moves = false;
      for (int r = 0; r < ranks; ++r) moves = step(state, r) || moves;
      if (!moves) end(state);
    }
  }

  void end(const State& state) {
    ++ends;
    for (int r = 0; r < ranks; ++r) CHECK(state.ranks[r].at == At::kDone);
    for (int m = 1; m <= meetings; ++m) together += state.ranks[0].outcomes[m] == kTogether;
  }

  bool has_come(const State& s, int rank, uint8_t meeting) const {
    return s.seats[rank].number[0] == meeting || s.seats[rank].number[1] == meeting;
  }
  uint8_t vector_of(const State& s, int rank, uint8_t meeting) const {
    return s.seats[rank].vector[s.seats[rank].number[0] == meeting ? 0 : 1];
  }

  void conclude(State* s, int r, Outcome outcome) const {
    RankModel& me = s->ranks[r];
    me.outcomes[me.meeting] = outcome;
    for (int other = 0; other < ranks; ++other) {
      const Outcome theirs = s->ranks[other].outcomes[me.meeting];
      CHECK(theirs == kNone || theirs == outcome);
    }
    me.i = 0;
    me.at = outcome == kTogether ? At::kTake : At::kLeave;
  }

  void wake(State* s, At from, At to) const {
    for (int r = 0; r < ranks; ++r) {
      if (s->ranks[r].at == from) s->ranks[r].at = to;
    }
  }

  // All next states by one step of rank `r`; false: there is none.
  bool step(const State& state, int r) {
    State next = state;
    RankModel& me = next.ranks[r];
    SeatModel& seat = next.seats[r];
    const uint8_t meeting = me.meeting;
    const auto go = [&](At at) {
      me.at = at;
      add(next);
      return true;
    };
    switch (me.at) {
      case At::kBegin:
        me.slot = seat.number[1] >= seat.number[0] ? 0 : 1;
        me.i = 0;
        me.contributed = 0;
        return go(At::kLeft);
      case At::kLeft:
        if (next.seats[me.i].left < seat.number[me.slot]) return go(At::kLook);
        return ++me.i == ranks ? go(At::kWrite) : go(At::kLeft);
      case At::kWrite:
        seat.vector[me.slot] = meeting;
        return go(At::kNumber);
      case At::kNumber:
        seat.number[me.slot] = meeting;
        me.contributed = 1;
        return go(At::kLook);
      case At::kLook:
        me.seen = next.verdict;
        if (me.seen.met == meeting || me.seen.number >= meeting) {
          conclude(&next, r, me.seen.met == meeting ? kTogether : kByTheDaemon);
          add(next);
          return true;
        }
        me.i = 0;
        return go(me.contributed ? At::kEverybody : At::kPart);
      case At::kEverybody:
        if (has_come(next, me.i, meeting)) return ++me.i == ranks ? go(At::kMeet) : go(At::kEverybody);
        if (impatient) go(At::kPart);
        return go(At::kSleepers);
      case At::kMeet:
      case At::kPart: {
        const bool meets = me.at == At::kMeet;
        if (!(next.verdict == me.seen)) return go(At::kLook);
        next.verdict = {meets ? meeting : me.seen.met, meeting, static_cast<uint8_t>(!meets)};
        return go(At::kWake);
      }
      case At::kWake:
        if (next.sleepers > 0) wake(&next, At::kSleeping, At::kAwake);
        return go(At::kLook);
      case At::kSleepers:
        ++next.sleepers;
        return go(At::kCheck);
      case At::kCheck:
        return go(next.verdict == me.seen ? At::kFutex : At::kAwake);
      case At::kFutex:  // the kernel compares the low half
        return go(next.verdict.number == me.seen.number && next.verdict.apart == me.seen.apart ? At::kSleeping
                                                                                               : At::kAwake);
      case At::kSleeping:
        return impatient && go(At::kAwake);
      case At::kAwake:
        --next.sleepers;
        return go(At::kLook);
      case At::kTake:
        CHECK_EQ(vector_of(next, me.i, meeting), meeting);
        return ++me.i == ranks ? go(At::kSlice) : go(At::kTake);
      case At::kSlice:
        seat.slice = meeting;
        return go(At::kReduced);
      case At::kReduced:
        seat.reduced = meeting;
        return go(At::kSlices);
      case At::kSlices:
        ++next.slices;
        return go(At::kWakeForSlices);
      case At::kWakeForSlices:
        if (next.slice_sleepers > 0) wake(&next, At::kSliceSleeping, At::kSliceAwake);
        me.i = 0;
        return go(At::kAwaitSlice);
      case At::kAwaitSlice:
        if (me.i == ranks) return go(At::kLeave);
        if (next.seats[me.i].reduced == meeting) return go(At::kCopySlice);
        if (impatient) go(At::kReduceSlice);
        return go(At::kSliceSeen);
      case At::kSliceSeen:
        me.seen_slices = next.slices;
        return go(At::kSliceSleepers);
      case At::kSliceSleepers:
        ++next.slice_sleepers;
        return go(At::kSliceCheck);
      case At::kSliceCheck:
        return go(next.seats[me.i].reduced != meeting ? At::kSliceFutex : At::kSliceAwake);
      case At::kSliceFutex:
        return go(next.slices == me.seen_slices ? At::kSliceSleeping : At::kSliceAwake);
      case At::kSliceSleeping:
        return impatient && go(At::kSliceAwake);
      case At::kSliceAwake:
        --next.slice_sleepers;
        return go(At::kAwaitSlice);
      case At::kCopySlice:
        CHECK_EQ(next.seats[me.i].slice, meeting);
        ++me.i;
        return go(At::kAwaitSlice);
      case At::kReduceSlice:
        for (int other = 0; other < ranks; ++other) CHECK_EQ(vector_of(next, other, meeting), meeting);
        ++me.i;
        return go(At::kAwaitSlice);
      case At::kLeave:
        seat.left = meeting;
        ++me.meeting;
        return go(me.meeting > meetings ? At::kDone : At::kBegin);
      case At::kDone:
        return false;
    }
    return false;
  }
};

size_t search(int ranks, int meetings, bool impatient) {
  Search search{ranks, meetings, impatient};
  search.run();
  EXPECT(search.ends > 0 && search.together > 0);
  if (!impatient) EXPECT_EQ(search.together, search.ends * static_cast<size_t>(meetings));
  return search.seen.size();
}

}  // namespace

// All come to the same end, read what was brought to this meeting, and nobody sleeps for ever.
TEST(two_ranks_four_meetings) {
  EXPECT(search(2, 4, false) > 1000);
  EXPECT(search(2, 4, true) > 1000);
}

TEST(three_ranks) {
  const int meetings = std::getenv("BAGUA_TEST_FULL") != nullptr ? 2 : 1;
  EXPECT(search(3, meetings + 1, false) > 1000);
  EXPECT(search(3, meetings, true) > 1000);
}

}  // namespace bagua
