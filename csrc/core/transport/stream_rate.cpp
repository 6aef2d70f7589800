#include "transport/stream_rate.h"

#include <algorithm>
#include <cmath>

namespace bagua {

namespace {

// How many later chunks receivers can take while an earlier one is late: the length of the windows in core/collective.
constexpr double kAhead = 8;
// How many times later than on the others a chunk may arrive: measurements are rough, and streams of one link differ.
constexpr double kTolerance = 2;

}  // namespace

void StreamRate::sample(int64_t now, uint64_t written, uint64_t queued) {
  const uint64_t acknowledged = written - std::min(queued, written);
  const int64_t span = now - sampled_ns_;
  if (busy_ && span > 0) {
    const double measured = static_cast<double>(acknowledged - acknowledged_) * 1e9 / static_cast<double>(span);
    if (queued == 0) {
      rate_ = std::max(rate_, measured);  // the stream was idle for a part of the interval
    } else if (rate_ == kUnknown) {
      rate_ = measured;
    } else {
      const double weight = static_cast<double>(span) / static_cast<double>(span + kSmoothNs);
      rate_ += (measured - rate_) * weight;
    }
    measured_ns_ = now;
  }
  sampled_ns_ = now;
  acknowledged_ = acknowledged;
  busy_ = queued > 0;
}

double StreamRate::rate(int64_t now) const {
  if (rate_ == kUnknown || busy_) return rate_;
  const double doublings = static_cast<double>(now - measured_ns_) / static_cast<double>(kForgetNs);
  return doublings < 1 ? rate_ : rate_ * std::exp2(std::min(doublings, 20.0));
}

int choose_stream(const StreamLoad* streams, int count, int begin, double chunk, double queued) {
  double fastest = StreamRate::kUnknown;
  for (int i = 0; i < count; ++i) fastest = std::max(fastest, streams[i].rate);
  if (fastest <= 0) fastest = 1;  // without measurements all count as equal
  const auto rate = [&](int i) {
    // A stream without a measurement counts as fast as the fastest; one that stands still, as a thousandth of that.
    return streams[i].rate == StreamRate::kUnknown ? fastest : std::max(streams[i].rate, fastest / 1000);
  };
  const auto finish = [&](int i) { return (streams[i].backlog + chunk) / rate(i); };
  int best = -1;
  for (int k = 0; k < count; ++k) {
    const int i = (begin + k) % count;
    if (streams[i].free && (best < 0 || finish(i) < finish(best))) best = i;
  }
  if (best < 0) return -1;
  double others = 0, backlog = 0, soonest = -1;
  for (int i = 0; i < count; ++i) {
    if (i == best || streams[i].free) continue;  // a free stream is no better than the best free one
    others += rate(i);
    backlog += streams[i].backlog;
    soonest = soonest < 0 ? finish(i) : std::min(soonest, finish(i));
  }
  if (soonest < 0) return best;
  const double together = (backlog + std::min(queued, kAhead * chunk)) / others;
  return finish(best) <= kTolerance * std::max(together, soonest) ? best : -1;
}

}  // namespace bagua
