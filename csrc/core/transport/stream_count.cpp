#include "transport/stream_count.h"

#include <algorithm>
#include <utility>

namespace bagua {

void StreamCount::update(int64_t now, uint64_t arrived, uint64_t on_way, bool waiting) {
  if (!std::exchange(started_, true)) go_by_verdict(now);
  const uint64_t came = arrived > arrived_ ? arrived - arrived_ : 0;  // the sum can shrink when a stream is lost
  if (waiting_ || (on_way_ >= kBusyBytes && came < on_way_)) {
    const int64_t span = now - now_;
    if (settled_ns_ < kSettleNs) {
      settled_ns_ += span;
    } else {
      ns_ += span;
      bytes_ += came;
      if (phase_ == Phase::kTryOne) note_window();
    }
  }
  came_ += came;
  now_ = now;
  arrived_ = arrived;
  on_way_ = on_way;
  waiting_ = waiting;
  if (enough()) decide(now);
}

void StreamCount::note_window() {
  const int64_t span = ns_ - window_ns_;
  if (span < kWindowNs) return;
  one_ = std::max(one_, static_cast<double>(bytes_ - window_bytes_) / static_cast<double>(span));
  window_ns_ = ns_;
  window_bytes_ = bytes_;
}

bool StreamCount::enough() const {
  if (phase_ == Phase::kTryAll) return ns_ >= kAllNs || bytes_ >= kAllBytes || came_ >= kAllIdleBytes;
  return ns_ >= kOneNs || bytes_ >= kOneBytes;
}

// Applies a known verdict. Returns true if there is one.
bool StreamCount::go_by_verdict(int64_t now) {
  const StreamVerdict::Value verdict = verdict_->get();
  if (now >= verdict.until_ns) return false;
  begin(verdict.all ? Phase::kAll : Phase::kOne);
  return true;
}

void StreamCount::decide(int64_t now) {
  switch (phase_) {
    case Phase::kTryOne:
      one_ = std::max(one_, rate());
      return begin(Phase::kTryAll);
    case Phase::kTryAll:
      if (rate() <= kGain * one_) return hold(false, now);
      if (++for_all_ < 2) return begin(Phase::kTryOne);
      return hold(true, now);
    case Phase::kOne:
    case Phase::kAll:
      return look(now);
  }
}

void StreamCount::hold(bool all, int64_t now) {
  const StreamVerdict::Value before = verdict_->get();
  const bool confirmed = before.until_ns > 0 && before.all == all;
  const int64_t first = all ? kHoldAllNs : kHoldNs;
  const int64_t hold = confirmed ? std::min(2 * before.hold_ns, kLongestHoldNs) : first;
  verdict_->set({all, all ? rate() : one_, now + hold, hold});
  for_all_ = 0;
  begin(all ? Phase::kAll : Phase::kOne);
}

// If a link has become much slower, a single stream may be limited now, so a new trial may be needed. But other traffic
// or a busy processor may be the reason, too.
void StreamCount::look(int64_t now) {
  const StreamVerdict::Value verdict = verdict_->get();
  slow_looks_ = rate() < verdict.rate / 2 ? slow_looks_ + 1 : 0;
  const bool doubted = slow_looks_ >= kSlowLooks && now >= verdict.until_ns - verdict.hold_ns + kDoubtNs;
  if (!doubted && go_by_verdict(now)) return;
  slow_looks_ = 0;
  one_ = 0;
  begin(Phase::kTryOne);
}

void StreamCount::begin(Phase phase) {
  phase_ = phase;
  settled_ns_ = 0;
  ns_ = 0;
  bytes_ = 0;
  came_ = 0;
  window_ns_ = 0;
  window_bytes_ = 0;
}

}  // namespace bagua
