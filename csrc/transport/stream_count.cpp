#include "transport/stream_count.h"

#include <algorithm>
#include <utility>

namespace bagua {

void StreamCount::update(int64_t now, uint64_t arrived, bool saturated) {
  if (!std::exchange(started_, true)) go_by_verdict(now);
  if (saturated_) {
    const int64_t span = now - now_;
    if (settled_ns_ < kSettleNs) {
      settled_ns_ += span;
    } else {
      ns_ += span;
      bytes_ += arrived > arrived_ ? arrived - arrived_ : 0;  // a stream may have gone, with what it brought
    }
  }
  now_ = now;
  arrived_ = arrived;
  saturated_ = saturated;
  if (enough()) decide(now);
}

bool StreamCount::enough() const {
  if (phase_ == Phase::kTryAll) return ns_ >= kAllNs || bytes_ >= kAllBytes;
  return ns_ >= kOneNs || bytes_ >= kOneBytes;
}

// True if there is one to go by.
bool StreamCount::go_by_verdict(int64_t now) {
  const StreamVerdict::Value verdict = (verdict_ != nullptr ? verdict_ : &own_)->get();
  if (now >= verdict.until_ns) return false;
  begin(verdict.all ? Phase::kAll : Phase::kOne);
  return true;
}

void StreamCount::decide(int64_t now) {
  switch (phase_) {
    case Phase::kTryOne:
      one_ = rate();
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
  StreamVerdict* const shared = verdict_ != nullptr ? verdict_ : &own_;
  const StreamVerdict::Value before = shared->get();
  const bool confirmed = before.until_ns > 0 && before.all == all;
  const int64_t hold = confirmed ? std::min(2 * before.hold_ns, kLongestHoldNs) : kHoldNs;
  shared->set({all, all ? rate() : one_, now + hold, hold});
  for_all_ = 0;
  begin(all ? Phase::kAll : Phase::kOne);
}

// A link that has become much slower may have changed its nature: a single stream may crawl while others run. But other
// traffic slows it down, too, and a busy processor.
void StreamCount::look(int64_t now) {
  const StreamVerdict::Value verdict = (verdict_ != nullptr ? verdict_ : &own_)->get();
  slow_looks_ = rate() < verdict.rate / 2 ? slow_looks_ + 1 : 0;
  const bool doubted = slow_looks_ >= kSlowLooks && now >= verdict.until_ns - verdict.hold_ns + kDoubtNs;
  if (!doubted && go_by_verdict(now)) return;
  slow_looks_ = 0;
  begin(Phase::kTryOne);
}

void StreamCount::begin(Phase phase) {
  phase_ = phase;
  settled_ns_ = 0;
  ns_ = 0;
  bytes_ = 0;
}

}  // namespace bagua
