#include "channel/meeting.h"

#include <sched.h>

#include <algorithm>
#include <cstring>

#include "base/clock.h"
#include "channel/futex.h"
#include "kernel/reduce.h"

namespace bagua {

namespace {

// A rank yields its core only if ranks have usually come within this time. Where they compute for longer, each yield
// costs them time.
constexpr int64_t kWorthYieldingNs = 150'000;

uint64_t verdict_of(uint64_t met, uint32_t number, MeetingState state) {
  return met << 32 | (number << 2 | state);
}

uint32_t last_met(uint64_t verdict) {
  return static_cast<uint32_t>(verdict >> 32);
}

// True if `one` is `other` or a later meeting. Numbers wrap around.
bool not_before(uint32_t one, uint32_t other) {
  return static_cast<int32_t>(one - other) >= 0;
}

// The verdict is on this meeting or on a later one.
bool decided(uint64_t verdict, uint32_t number) {
  return not_before(static_cast<uint32_t>(verdict) & ~3u, number << 2);
}

std::atomic<uint32_t>* futex_word(std::atomic<uint64_t>* verdict) {
  static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the low half comes first");
  return reinterpret_cast<std::atomic<uint32_t>*>(verdict);  // its address alone is used
}

MeetingCall call_of(const Descriptor& d) {
  const auto kind = static_cast<Kind>(d.kind);
  return {d.count, kind_rooted(kind) ? d.root : -1, d.kind, d.dtype, kind_reduces(kind) ? d.op : uint8_t{0}};
}

uint64_t bytes_of(const MeetingCall& call) {
  return call.count * dtype_size(static_cast<DType>(call.dtype));
}

void copy(char* to, const char* from, uint64_t bytes) {
  if (to != from && bytes > 0) memmove(to, from, bytes);
}

// Spins or yields a limited number of times. goes_on() is false when it is time to sleep.
class BeforeSleep {
 public:
  BeforeSleep(const MeetingWaits& waits, int64_t usual_ns)
      : spins_(waits.spins), yields_(usual_ns < kWorthYieldingNs ? waits.yields : 0) {}
  bool goes_on() {
    if (spins_ > 0) {
      --spins_;
      spin_pause();
      return true;
    }
    if (yields_ <= 0) return false;
    --yields_;
    sched_yield();
    return true;
  }

 private:
  int spins_, yields_;
};

// Sleeps on a word, whose writers look for `sleepers` behind their write: both sides are sequentially consistent, so
// one sees the other.
template <class Unchanged>
void sleep(std::atomic<uint32_t>* word, std::atomic<uint32_t>* sleepers, uint32_t seen, int64_t deadline_ns,
           const Unchanged& unchanged) {
  sleepers->fetch_add(1);
  if (unchanged()) futex_wait(word, seen, deadline_ns);
  sleepers->fetch_sub(1);
}

}  // namespace

Meeting::Meeting(Counters* counters, GenerationPage* page, uint32_t room, uint32_t own, uint32_t ranks,
                 const MeetingWaits& waits)
    : counters_(counters),
      room_(&page->rooms[room]),
      vectors_(vectors_of(page, room)),
      own_(own),
      ranks_(ranks),
      waits_(waits) {}

bool Meeting::accepts(const Descriptor& d) const {
  // The daemon says what is wrong with other calls.
  const auto kind = static_cast<Kind>(d.kind);
  if (d.kind >= static_cast<uint8_t>(Kind::kSend) || d.codec != 0 || d.dtype >= kDTypes) return false;
  if (kind_rooted(kind) && (d.root < 0 || static_cast<uint32_t>(d.root) >= ranks_)) return false;
  const auto dtype = static_cast<DType>(d.dtype);
  if (kind_reduces(kind) && (!op_known(d.op) || !op_supported(dtype, static_cast<ReduceOp>(d.op)))) return false;
  if (kind == Kind::kBarrier) return true;
  if (d.count == 0 || ranks_ == 1) return d.count > 0;
  return d.count <= kMeetingBytes / dtype_size(dtype) / blocks_of(kind, true, ranks_).src;
}

Status Meeting::attend(uint32_t number, const Descriptor& descriptor, const char* src, char* dst, const Usable& usable,
                       const Interrupted& interrupted, bool* met) {
  *met = false;
  const MeetingCall call = call_of(descriptor);
  if (ranks_ == 1) {
    *met = true;
    met_ns_ = now_ns();
    make_result(number, call, &src, dst);
    return Status::ok();
  }
  const int64_t came = now_ns();
  const bool contributed = contribute(number, call, src);
  const Status status = await(number, call, contributed, usable, interrupted, met);
  met_ns_ = now_ns();
  usual_ns_ += (std::min(met_ns_ - came, 2 * kWorthYieldingNs) - usual_ns_) / 4;  // one late rank changes little
  if (*met) {
    const char* brought[kMeetingRanks];
    for (uint32_t i = 0; i < ranks_; ++i) brought[i] = vector(i, number);
    make_result(number, call, brought, dst);
  }
  room_->seats[own_].left.store(number);
  return status;
}

bool Meeting::contribute(uint32_t number, const MeetingCall& call, const char* src) {
  Contribution* const both = room_->seats[own_].contributions;
  const uint32_t oldest = not_before(both[1].number.load(), both[0].number.load()) ? 0 : 1;
  Contribution& older = both[oldest];
  const uint32_t last = older.number.load();
  for (uint32_t i = 0; i < ranks_; ++i) {
    if (!not_before(room_->seats[i].left.load(), last)) return false;
  }
  older.call = call;
  const uint64_t blocks = blocks_of(static_cast<Kind>(call.kind), static_cast<uint32_t>(call.root) == own_, ranks_).src;
  if (src != nullptr) copy(vectors_->brought[own_][oldest], src, blocks * bytes_of(call));
  older.number.store(number);
  return true;
}

Status Meeting::await(uint32_t number, const MeetingCall& call, bool contributed, const Usable& usable,
                      const Interrupted& interrupted, bool* met) {
  const int64_t patience = contributed ? now_ns() + waits_.patience_ns : 0;
  BeforeSleep before_sleep(waits_, usual_ns_);
  Status status;
  for (;;) {
    const uint64_t seen = room_->verdict.load();
    if (last_met(seen) == number) {  // maybe long ago: others may have ended later ones since
      *met = true;
      return status.code() == Code::kAborted ? status : Status::ok();  // it is done, and the signal is to be heard
    }
    if (decided(seen, number)) return status;
    if (contributed && everybody(number)) {
      decide(seen, number, calls_agree(number, call) ? kMet : kApart);
    } else if (status && contributed && before_sleep.goes_on()) {
      continue;
    } else if (!status || now_ns() >= patience) {
      decide(seen, number, kApart);
    } else {
      const auto same = [&] { return room_->verdict.load() == seen; };
      sleep(futex_word(&room_->verdict), &room_->sleepers, static_cast<uint32_t>(seen), patience, same);
      if (!same()) continue;
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
    if (other.count != own.count || other.root != own.root || other.kind != own.kind || other.dtype != own.dtype ||
        other.op != own.op) {
      return false;
    }
  }
  return true;
}

void Meeting::stay_away(uint32_t number, const Descriptor& descriptor) {
  if (ranks_ == 1 || !accepts(descriptor)) return;
  for (uint64_t seen = room_->verdict.load(); !decided(seen, number); seen = room_->verdict.load()) {
    decide(seen, number, kApart);
  }
}

void Meeting::decide(uint64_t seen, uint32_t number, MeetingState state) {
  const uint64_t verdict = verdict_of(state == kMet ? number : last_met(seen), number, state);
  if (!room_->verdict.compare_exchange_strong(seen, verdict)) return;  // another rank was first
  if (room_->sleepers.load() > 0) futex_wake(futex_word(&room_->verdict));
}

void Meeting::make_result(uint32_t number, const MeetingCall& call, const char* const* brought, char* dst) {
  const int64_t started = now_ns();
  const uint64_t block = bytes_of(call), mine = own_ * block;
  const uint32_t root = static_cast<uint32_t>(call.root);
  const auto reduce_from = [&](uint64_t offset) {
    const void* sources[kMeetingRanks];
    for (uint32_t i = 0; i < ranks_; ++i) sources[i] = brought[i] + offset;
    void* const target = dst;
    reduce(static_cast<DType>(call.dtype), static_cast<ReduceOp>(call.op), sources, static_cast<int>(ranks_), &target,
           1, call.count, ranks_, false);
  };
  switch (static_cast<Kind>(call.kind)) {
    case Kind::kAllReduce:
      if (ranks_ > 1 && ranks_ * block > kMostRead) {
        reduce_by_slices(number, call, brought, dst);
      } else {
        reduce_from(0);
      }
      break;
    case Kind::kReduce:
      if (root == own_) reduce_from(0);
      break;
    case Kind::kReduceScatter:
      reduce_from(mine);
      break;
    case Kind::kBroadcast:
      if (dst != nullptr) copy(dst, brought[root], block);
      break;
    case Kind::kAllGather:
      for (uint32_t i = 0; i < ranks_; ++i) copy(dst + i * block, brought[i], block);
      break;
    case Kind::kGather:
      for (uint32_t i = 0; root == own_ && i < ranks_; ++i) copy(dst + i * block, brought[i], block);
      break;
    case Kind::kScatter:
      copy(dst, brought[root] + mine, block);
      break;
    case Kind::kAllToAll:
      for (uint32_t i = 0; i < ranks_; ++i) copy(dst + i * block, brought[i] + mine, block);
      break;
    default:
      break;  // a barrier
  }
  if (own_ == 0) add_to_counters(call, started);
}

// Each rank writes its slice for all, and takes those of the others. One that does not come is reduced here.
void Meeting::reduce_by_slices(uint32_t number, const MeetingCall& call, const char* const* brought, char* dst) {
  const auto dtype = static_cast<DType>(call.dtype);
  const uint64_t element = dtype_size(dtype);
  const uint64_t share = ((call.count + ranks_ - 1) / ranks_ + kSliceStep - 1) / kSliceStep * kSliceStep;
  const auto begin_of = [&](uint32_t slice) { return std::min(slice * share, call.count); };
  const auto reduce_slice = [&](uint32_t slice, int targets) {
    const uint64_t begin = begin_of(slice), offset = begin * element;
    const void* sources[kMeetingRanks];
    for (uint32_t i = 0; i < ranks_; ++i) sources[i] = brought[i] + offset;
    void* const to[] = {dst + offset, vectors_->reduced + offset};
    reduce(dtype, static_cast<ReduceOp>(call.op), sources, static_cast<int>(ranks_), to, targets,
           begin_of(slice + 1) - begin, ranks_, false);
  };
  reduce_slice(own_, 2);
  room_->seats[own_].reduced.store(number);
  room_->slices.fetch_add(1);
  if (room_->slice_sleepers.load() > 0) futex_wake(&room_->slices);
  const int64_t patience = now_ns() + waits_.patience_ns;
  for (uint32_t step = 1; step < ranks_; ++step) {
    const uint32_t slice = (own_ + step) % ranks_;
    if (await_slice(slice, number, patience)) {
      const uint64_t offset = begin_of(slice) * element;
      copy(dst + offset, vectors_->reduced + offset, (begin_of(slice + 1) - begin_of(slice)) * element);
    } else {
      reduce_slice(slice, 1);
    }
  }
}

bool Meeting::await_slice(uint32_t rank, uint32_t number, int64_t patience) {
  BeforeSleep before_sleep(waits_, usual_ns_);
  const auto there = [&] { return room_->seats[rank].reduced.load() == number; };  // it goes on when all have left
  while (!there()) {
    if (before_sleep.goes_on()) continue;
    if (now_ns() >= patience) return false;
    const uint32_t seen = room_->slices.load();
    sleep(&room_->slices, &room_->slice_sleepers, seen, patience, [&] { return !there(); });
  }
  return true;
}

void Meeting::add_to_counters(const MeetingCall& call, int64_t started) {
  const uint64_t blocks = blocks_of(static_cast<Kind>(call.kind), false, ranks_).src * (ranks_ - 1) +
                          blocks_of(static_cast<Kind>(call.kind), true, ranks_).src;
  counters_->bytes_local.fetch_add(blocks * bytes_of(call), std::memory_order_relaxed);
  counters_->ops.fetch_add(1, std::memory_order_relaxed);
  counters_->comm_ns.fetch_add(static_cast<uint64_t>(now_ns() - started), std::memory_order_relaxed);
}

void Meeting::disturb(GenerationPage* page) {
  for (MeetingRoom& room : page->rooms) {
    if (room.sleepers.load() > 0) futex_wake(futex_word(&room.verdict));
  }
}

}  // namespace bagua
