#include "transport/stream_count.h"

namespace bagua {

void StreamCount::update(int64_t now, uint64_t arrived, bool saturated) {
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
  if (ns_ >= kTrialNs || bytes_ >= kTrialBytes) decide(now);
}

void StreamCount::decide(int64_t now) {
  switch (phase_) {
    case Phase::kTryOne:
      one_ = rate();
      return begin(Phase::kTryAll, now);
    case Phase::kTryAll: {
      const bool more = rate() > kGain * one_;
      held_ = more ? rate() : one_;
      return begin(more ? Phase::kAll : Phase::kOne, now);
    }
    case Phase::kOne:
    case Phase::kAll:
      // A link that has become much slower may have changed its nature: a single stream may crawl while others run.
      if (now - held_since_ >= kHoldNs || rate() < held_ / 2) return begin(Phase::kTryOne, now);
      ns_ = 0;
      bytes_ = 0;
  }
}

void StreamCount::begin(Phase phase, int64_t now) {
  phase_ = phase;
  held_since_ = now;
  settled_ns_ = 0;
  ns_ = 0;
  bytes_ = 0;
}

}  // namespace bagua
