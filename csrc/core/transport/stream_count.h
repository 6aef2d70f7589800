// Decides by trials whether chunks to a peer use one stream or all.
//
// If a single stream fills the link, more streams only compete: chunks arrive late and out of order, and a shallow
// queue on the way drops more (measured at 1 Gbit/s with 5 ms of delay: 99 % of the rate with one stream, 80 % with
// four). If each stream is limited (per-flow limits of clouds, loss on long links, one core per stream), several carry
// more. Only a trial tells the two cases apart.
//
// A trial uses one stream first, then all streams for a short time, so that it costs little. A busy processor, or a
// connection that has not found its rate yet, can make one stream look slower than it is, but never faster. So the best
// rate of one stream counts, and "all" must win two trials. The verdict belongs to a pair of hosts, so later meshes use
// it, too. "One" is valid for a minute, "all" for a quarter of that, because a wrong "all" costs more. Each
// confirmation doubles the time.
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
    int64_t until_ns = 0;  // valid until then; 0: no verdict
    int64_t hold_ns = 0;   // for how long the latest verdict is valid
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
  // A trial of one stream ends after this much busy time, or this many bytes; a verdict is checked as often.
  static constexpr int64_t kOneNs = 400'000'000;
  static constexpr uint64_t kOneBytes = 64u << 20;
  // A trial of all streams ends after this much busy time, or this many bytes in it, or this many bytes in total.
  static constexpr int64_t kAllNs = 150'000'000;
  static constexpr uint64_t kAllBytes = 32u << 20;
  static constexpr uint64_t kAllIdleBytes = 8 * kAllBytes;
  static constexpr int64_t kSettleNs = 100'000'000;   // busy time before a trial counts: TCP finds its rate
  static constexpr int64_t kLookNs = 5'000'000;       // between two updates
  static constexpr uint64_t kBusyBytes = 512u << 10;  // the link is busy with this many bytes on their way
  static constexpr int64_t kWindowNs = 100'000'000;   // the rate of one stream is that of its best window
  // How long verdicts are valid: the first "one", the first "all", and at most.
  static constexpr int64_t kHoldNs = 60'000'000'000;
  static constexpr int64_t kHoldAllNs = kHoldNs / 4;
  static constexpr int64_t kLongestHoldNs = 16 * kHoldNs;
  static constexpr int kSlowLooks = 4;               // checks in a row below half the rate that start a new trial
  static constexpr int64_t kDoubtNs = kHoldNs / 12;  // the least time between a verdict and such a trial
  static constexpr double kGain = 1.2;               // all streams are used if they are this much faster than one

  // Uses a verdict that is shared with other meshes and must outlive this object. Call it before the first update().
  void share(StreamVerdict* verdict) { verdict_ = verdict; }
  // True: chunks use all streams now. False: they use one while it has room.
  bool all() const { return phase_ == Phase::kTryAll || phase_ == Phase::kAll; }
  // True if update() should be called.
  bool due(int64_t now, bool waiting) const { return waiting != waiting_ || now - now_ >= kLookNs; }
  // Takes in a sample at time `now`. `arrived`: bytes that this peer has acknowledged (in the plugin for NCCL: that the
  // kernel has taken). `on_way`: bytes in sockets. `waiting`: more bytes wait for a stream. An interval counts only if
  // the link was busy all the time: at its beginning bytes waited, or many were on their way and some of these had not
  // arrived at its end. (All streams together can hold so many bytes that none ever wait.)
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
  StreamVerdict* verdict_ = &own_;
  Phase phase_ = Phase::kTryOne;
  bool started_ = false;
  bool waiting_ = false;  // at the last update()
  uint64_t on_way_ = 0;   // at the last update()
  int64_t now_ = 0;
  uint64_t arrived_ = 0;
  int64_t settled_ns_ = 0;  // busy time of this trial that was not counted
  int64_t ns_ = 0;          // busy time of this trial, or since a valid verdict was last checked
  uint64_t bytes_ = 0;
  uint64_t came_ = 0;          // bytes in this trial, busy or not
  int64_t window_ns_ = 0;      // ns_ at the beginning of the present window
  uint64_t window_bytes_ = 0;  // bytes_ at the same time
  double one_ = 0;             // best rate of one stream, in bytes per ns
  int for_all_ = 0;            // trials in a row that "all" has won
  int slow_looks_ = 0;
};

}  // namespace bagua
