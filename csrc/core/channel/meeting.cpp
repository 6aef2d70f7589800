#include "channel/meeting.h"

#include <algorithm>
#include <cstring>

#include "base/clock.h"
#include "channel/futex.h"
#include "kernel/reduce.h"

namespace bagua {

namespace {

constexpr int64_t kLookNs = 100'000'000;        // how often one who waits for a result looks whether all is well
constexpr int64_t kLongestNs = 60'000'000'000;  // for a result: more than any machine needs

uint32_t verdict_of(uint32_t number, MeetingState state) {
  return number << 2 | state;
}

}  // namespace

bool Meeting::takes(const Descriptor& descriptor) {
  if (descriptor.kind != static_cast<uint8_t>(Kind::kAllReduce) || descriptor.comm != 0 || descriptor.codec != 0) {
    return false;
  }
  if (descriptor.dtype >= kDTypes || !op_known(descriptor.op)) return false;  // the daemon says why not
  const DType dtype = static_cast<DType>(descriptor.dtype);
  return descriptor.count > 0 && descriptor.count <= kMeetingBytes / dtype_size(dtype) &&
         op_supported(dtype, static_cast<ReduceOp>(descriptor.op));
}

Status Meeting::attend(uint32_t number, const Descriptor& descriptor, const char* src, char* dst,
                       const std::function<Status()>& usable, const std::function<bool()>& interrupted, bool* met) {
  *met = false;
  const size_t bytes = descriptor.count * dtype_size(static_cast<DType>(descriptor.dtype));
  Seat* const seat = &room_->seats[own_];
  const MeetingCall call{descriptor.count, descriptor.dtype, descriptor.op};
  seat->call = call;
  memcpy(seat->data, src, bytes);
  seat->number.store(number);
  const int64_t began = now_ns(), patience = began + patience_ns_;
  int spins = 0;
  Status status;
  for (;;) {
    uint32_t seen = room_->verdict.load();
    const auto ahead = static_cast<int32_t>((seen & ~3u) - (number << 2));
    const bool running = (seen & 3) == kRunning;
    if (room_->met.load() == number) {  // maybe long ago: others may have parted since
      memcpy(dst, room_->result, bytes);
      *met = true;
      return Status::ok();
    }
    if (ahead > 0 || seen == verdict_of(number, kApart)) return status;
    if (!running && everybody(number)) {
      if (room_->verdict.compare_exchange_strong(seen, verdict_of(number, kRunning))) reduce_all(number, call);
      continue;
    }
    if (!running && (!status || now_ns() >= patience)) {
      if (room_->verdict.compare_exchange_strong(seen, verdict_of(number, kApart)) && room_->sleepers.load() > 0) {
        futex_wake(&room_->verdict);
      }
      continue;
    }
    if (running && !status && status.code() != Code::kAborted) return status;  // who reduces is lost, and all with him
    if (spins++ < spins_) {
      spin_pause();
      continue;
    }
    sleep(seen, running ? now_ns() + kLookNs : patience);
    if (room_->verdict.load() != seen) continue;
    if (Status well = usable(); !well) {
      status = well;
    } else if (running && now_ns() - began > kLongestNs) {
      status = {Code::kUnavailable, "a rank of this host stopped while it reduced a small all-reduce for all of them"};
    } else if (status && interrupted && interrupted()) {
      status = {Code::kAborted, "interrupted"};
    }
  }
}

bool Meeting::everybody(uint32_t number) const {
  for (uint32_t i = 0; i < ranks_; ++i) {
    if (room_->seats[i].number.load() != number) return false;
  }
  return true;
}

bool Meeting::calls_agree(const MeetingCall& own) const {
  for (uint32_t i = 0; i < ranks_; ++i) {
    const MeetingCall other = room_->seats[i].call;
    if (other.count != own.count || other.dtype != own.dtype || other.op != own.op) return false;
  }
  return true;
}

void Meeting::reduce_all(uint32_t number, const MeetingCall& call) {
  if (!calls_agree(call)) return decide(verdict_of(number, kApart));
  const int64_t started = now_ns();
  const DType dtype = static_cast<DType>(call.dtype);
  const void* sources[kMeetingRanks];
  for (uint32_t i = 0; i < ranks_; ++i) sources[i] = room_->seats[i].data;
  void* const target = room_->result;
  reduce(dtype, static_cast<ReduceOp>(call.op), sources, static_cast<int>(ranks_), &target, 1, call.count, ranks_,
         false);
  Counters& counters = page_->counters;
  counters.bytes_local.fetch_add(ranks_ * call.count * dtype_size(dtype), std::memory_order_relaxed);
  counters.ops.fetch_add(1, std::memory_order_relaxed);
  counters.comm_ns.fetch_add(static_cast<uint64_t>(now_ns() - started), std::memory_order_relaxed);
  room_->met.store(number);
  decide(verdict_of(number, kMet));
}

void Meeting::decide(uint32_t verdict) {
  room_->verdict.store(verdict);
  if (room_->sleepers.load() > 0) futex_wake(&room_->verdict);
}

void Meeting::sleep(uint32_t seen, int64_t deadline_ns) {
  room_->sleepers.fetch_add(1);  // sequentially consistent, as is the store of a verdict: one of the two sees the other
  if (room_->verdict.load() == seen) futex_wait(&room_->verdict, seen, deadline_ns);
  room_->sleepers.fetch_sub(1);
}

}  // namespace bagua
