// Decides by trial whether one stream to a peer carries chunks, or all of them.
//
// Where a single stream fills the link, more of them only compete: each gets a share, chunks arrive late and out of
// turn, and a shallow queue on the way drops more (measured at 1 Gbit/s with 5 ms of delay: 99 % of the rate with one
// stream, 80 % with four). Where each stream is limited (per-flow limits of clouds, loss on long links, one core per
// stream), several carry more. Nothing but a trial tells the two apart.
//
// A trial begins with one stream and is short with all, so that nobody sees it where it changes nothing. A busy
// processor and a connection that still looks for its rate make one stream look slower than it is, never faster: what
// counts is the best that it was seen to do for a while, and a trial that says "all" must say so twice. The verdict
// belongs to the two hosts, not to one mesh: those that come later go by it. "One" is believed for a minute, "all" for
// a quarter of that, because a wrong one costs more; each time it is confirmed for twice as long.
#pragma once

#include <cstdint>

#include "base/mutex.h"

namespace bagua {

// The verdict for one pair of hosts. Any thread.
class StreamVerdict {
 public:
  struct Value {
    bool all = false;
    double rate = 0;       // bytes per ns
    int64_t until_ns = 0;  // believed so long; 0: nothing is known
    int64_t hold_ns = 0;   // for how long the latest one was to be believed
  };
  Value get() const {
    const Lock lock(mutex_);
    return value_;
  }
  void set(const Value& value) {
    const Lock lock(mutex_);
    value_ = value;
  }

 private:
  mutable Mutex mutex_;
  Value value_ GUARDED_BY(mutex_);
};

class StreamCount {
 public:
  static constexpr int64_t kOneNs = 400'000'000;            // of work: the trial of one stream ends after this or
  static constexpr uint64_t kOneBytes = 64u << 20;          // after this;
  static constexpr int64_t kAllNs = 150'000'000;            // that of all streams after this or
  static constexpr uint64_t kAllBytes = 32u << 20;          // after this; or when
  static constexpr uint64_t kAllIdleBytes = 8 * kAllBytes;  // came, mostly when there was little work
  static constexpr int64_t kSettleNs = 100'000'000;         // not counted: TCP looks for the rate
  static constexpr int64_t kLookNs = 5'000'000;             // between two updates
  static constexpr uint64_t kBusyBytes = 512u << 10;        // on their way: fewer may be a matter of latency
  static constexpr int64_t kWindowNs = 100'000'000;         // one stream is as fast as in the best of these
  static constexpr int64_t kHoldNs = 60'000'000'000;        // how long a first verdict is believed; for all:
  static constexpr int64_t kHoldAllNs = kHoldNs / 4;        // and at most:
  static constexpr int64_t kLongestHoldNs = 16 * kHoldNs;
  static constexpr int kSlowLooks = 4;               // so often in a row at half the rate: it must be tried again,
  static constexpr int64_t kDoubtNs = kHoldNs / 12;  // but not sooner than this after the latest verdict
  static constexpr double kGain = 1.2;               // what all streams must bring to be used

  // The verdict that is shared with other meshes; it must outlive this. Before the first update().
  void share(StreamVerdict* verdict) { verdict_ = verdict; }
  // Should chunks go to all streams now (true), or to one while it has room?
  bool all() const { return phase_ == Phase::kTryAll || phase_ == Phase::kAll; }
  // Is there something to tell update()?
  bool due(int64_t now, bool waiting) const { return waiting != waiting_ || now - now_ >= kLookNs; }
  // At time `now` so many bytes to this peer were known to have arrived, and so many were on their way, in sockets.
  // `waiting`: more wait for a stream. Only time in which the link had work from beginning to end is counted: it begins
  // with bytes that wait, or with many on their way that have not all arrived when it ends. (All streams together hold
  // so much that bytes may never wait.)
  void update(int64_t now, uint64_t arrived, uint64_t on_way, bool waiting);

 private:
  enum class Phase : uint8_t { kTryOne, kTryAll, kOne, kAll };
  void begin(Phase phase);
  bool go_by_verdict(int64_t now);
  bool enough() const;
  double rate() const { return ns_ > 0 ? static_cast<double>(bytes_) / static_cast<double>(ns_) : 0; }
  void note_window();
  void decide(int64_t now);
  void hold(bool all, int64_t now);
  void look(int64_t now);

  StreamVerdict own_;
  StreamVerdict* verdict_ = nullptr;  // nullptr: own_
  Phase phase_ = Phase::kTryOne;
  bool started_ = false;
  bool waiting_ = false;  // at the last update
  uint64_t on_way_ = 0;   // then
  int64_t now_ = 0;
  uint64_t arrived_ = 0;
  int64_t settled_ns_ = 0;  // busy time of this trial that was not counted
  int64_t ns_ = 0;          // busy time of this trial, or since the latest look at a held result
  uint64_t bytes_ = 0;
  uint64_t came_ = 0;          // in this trial, busy or not
  int64_t window_ns_ = 0;      // at the beginning of the present window: ns_
  uint64_t window_bytes_ = 0;  // and bytes_
  double one_ = 0;             // the best rate of one stream, bytes per ns
  int for_all_ = 0;            // trials in a row that were for all streams
  int slow_looks_ = 0;
};

}  // namespace bagua
