#include "channel/meeting.h"

#include <algorithm>
#include <cstring>

#include "base/clock.h"
#include "channel/futex.h"
#include "kernel/reduce.h"

namespace bagua {

namespace {

// Each rank reads the vectors of all: with more bytes the daemon's single pass costs less. Measured with four ranks on
// two cores: 16 KiB of each rank take 0.8 times as long as by the daemon, 32 KiB 0.9 times, 64 KiB up to 1.2 times.
constexpr size_t kMostRead = 128 << 10;

size_t room_bytes(uint32_t comm) {
  return comm == 0 ? kMeetingBytes : kSmallMeetingBytes;
}

uint64_t verdict_of(uint64_t met, uint32_t number, MeetingState state) {
  return met << 32 | (number << 2 | state);
}

uint32_t last_met(uint64_t verdict) {
  return static_cast<uint32_t>(verdict >> 32);
}

// The verdict is on this meeting or on a later one.
bool decided(uint64_t verdict, uint32_t number) {
  return static_cast<int32_t>((static_cast<uint32_t>(verdict) & ~3u) - (number << 2)) >= 0;
}

std::atomic<uint32_t>* futex_word(std::atomic<uint64_t>* verdict) {
  static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the low half comes first");
  return reinterpret_cast<std::atomic<uint32_t>*>(verdict);  // its address alone is used
}

}  // namespace

Meeting::Meeting(Counters* counters, GenerationPage* page, uint32_t comm, uint32_t own, uint32_t ranks, int spins,
                 int64_t patience_ns)
    : counters_(counters),
      room_(&page->rooms[comm]),
      bytes_(room_bytes(comm)),
      vectors_(comm == 0 ? page->vectors.of_world[0][0] : page->vectors.of_others[comm - 1][0][0]),
      own_(own),
      ranks_(ranks),
      spins_(spins),
      patience_ns_(patience_ns) {}

bool Meeting::takes(const Descriptor& descriptor, uint32_t ranks) {
  if (ranks == 0 || descriptor.comm >= kMeetingComms || descriptor.codec != 0) return false;
  if (descriptor.kind != static_cast<uint8_t>(Kind::kAllReduce)) return false;
  if (descriptor.dtype >= kDTypes || !op_known(descriptor.op)) return false;  // the daemon says why not
  const DType dtype = static_cast<DType>(descriptor.dtype);
  const size_t bytes = std::min<size_t>(room_bytes(descriptor.comm), kMostRead / ranks);
  return descriptor.count > 0 && descriptor.count <= bytes / dtype_size(dtype) &&
         op_supported(dtype, static_cast<ReduceOp>(descriptor.op));
}

Status Meeting::attend(uint32_t number, const Descriptor& descriptor, const char* src, char* dst, const Usable& usable,
                       const Interrupted& interrupted, bool* met) {
  *met = false;
  const MeetingCall call{descriptor.count, descriptor.dtype, descriptor.op};
  const bool contributed = contribute(number, call, src);
  const Status status = await(number, call, contributed, usable, interrupted, met);
  if (*met) reduce_all(number, call, dst);
  room_->seats[own_].left.store(number);
  return status;
}

bool Meeting::contribute(uint32_t number, const MeetingCall& call, const char* src) {
  Contribution* const both = room_->seats[own_].contributions;
  const uint32_t first = both[0].number.load(), second = both[1].number.load();
  const uint32_t oldest = static_cast<int32_t>(first - second) <= 0 ? 0 : 1;
  Contribution& older = both[oldest];
  const uint32_t last = older.number.load();
  for (uint32_t i = 0; i < ranks_; ++i) {
    if (static_cast<int32_t>(room_->seats[i].left.load() - last) < 0) return false;
  }
  older.call = call;
  memcpy(vector(own_, oldest), src, call.count * dtype_size(static_cast<DType>(call.dtype)));
  older.number.store(number);
  return true;
}

Status Meeting::await(uint32_t number, const MeetingCall& call, bool contributed, const Usable& usable,
                      const Interrupted& interrupted, bool* met) {
  const int64_t patience = contributed ? now_ns() + patience_ns_ : 0;
  int spins = 0;
  Status status;
  for (;;) {
    const uint64_t seen = room_->verdict.load();
    if (last_met(seen) == number) {  // maybe long ago: others may have ended later ones since
      *met = true;
      return Status::ok();
    }
    if (decided(seen, number)) return status;
    if (contributed && everybody(number)) {
      decide(seen, number, calls_agree(number, call) ? kMet : kApart);
    } else if (!status || now_ns() >= patience) {
      decide(seen, number, kApart);
    } else if (spins++ < spins_) {
      spin_pause();
    } else {
      sleep(seen, patience);
      if (room_->verdict.load() != seen) continue;
      status = usable();
      if (status && interrupted && interrupted()) status = {Code::kAborted, "interrupted"};
    }
  }
}

uint32_t Meeting::which(uint32_t rank, uint32_t number) const {
  return room_->seats[rank].contributions[0].number.load() == number ? 0 : 1;
}

bool Meeting::everybody(uint32_t number) const {
  for (uint32_t i = 0; i < ranks_; ++i) {
    if (contribution(i, number).number.load() != number) return false;
  }
  return true;
}

bool Meeting::calls_agree(uint32_t number, const MeetingCall& own) const {
  for (uint32_t i = 0; i < ranks_; ++i) {
    const MeetingCall other = contribution(i, number).call;
    if (other.count != own.count || other.dtype != own.dtype || other.op != own.op) return false;
  }
  return true;
}

void Meeting::reduce_all(uint32_t number, const MeetingCall& call, char* dst) {
  const int64_t started = now_ns();
  const DType dtype = static_cast<DType>(call.dtype);
  const void* sources[kMeetingRanks];
  for (uint32_t i = 0; i < ranks_; ++i) sources[i] = vector(i, which(i, number));
  void* const target = dst;
  reduce(dtype, static_cast<ReduceOp>(call.op), sources, static_cast<int>(ranks_), &target, 1, call.count, ranks_,
         false);
  if (own_ != 0) return;
  Counters& counters = *counters_;
  counters.bytes_local.fetch_add(ranks_ * call.count * dtype_size(dtype), std::memory_order_relaxed);
  counters.ops.fetch_add(1, std::memory_order_relaxed);
  counters.comm_ns.fetch_add(static_cast<uint64_t>(now_ns() - started), std::memory_order_relaxed);
}

void Meeting::decide(uint64_t seen, uint32_t number, MeetingState state) {
  const uint64_t verdict = verdict_of(state == kMet ? number : last_met(seen), number, state);
  if (!room_->verdict.compare_exchange_strong(seen, verdict)) return;  // another rank was first
  if (room_->sleepers.load() > 0) futex_wake(futex_word(&room_->verdict));
}

void Meeting::sleep(uint64_t seen, int64_t deadline_ns) {
  room_->sleepers.fetch_add(1);  // sequentially consistent, as is the swap of the verdict: one sees the other
  if (room_->verdict.load() == seen) {
    futex_wait(futex_word(&room_->verdict), static_cast<uint32_t>(seen), deadline_ns);
  }
  room_->sleepers.fetch_sub(1);
}

void Meeting::disturb(GenerationPage* page) {
  for (MeetingRoom& room : page->rooms) {
    if (room.sleepers.load() > 0) futex_wake(futex_word(&room.verdict));
  }
}

}  // namespace bagua
