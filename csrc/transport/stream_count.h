// Whether the streams to one peer carry chunks one at a time or all at once, by trying both.
//
// Where a single stream fills the link, more of them only compete: each gets a share, chunks arrive late and out of
// turn, and a shallow queue on the way drops more (measured at 1 Gbit/s with 5 ms of delay: 99 % of the rate with one
// stream, 80 % with four). Where each stream is limited (per-flow limits of clouds, loss on long links, one core per
// stream), several carry more. Nothing but a trial tells the two apart.
#pragma once

#include <cstdint>

namespace bagua {

class StreamCount {
 public:
  static constexpr int64_t kTrialNs = 400'000'000;    // of transfer; a trial ends after this or
  static constexpr uint64_t kTrialBytes = 64u << 20;  // after this
  static constexpr int64_t kSettleNs = 100'000'000;   // not counted: TCP looks for the rate
  static constexpr int64_t kLookNs = 5'000'000;       // between two updates
  static constexpr int64_t kHoldNs = 60'000'000'000;  // how long a result is believed
  static constexpr double kGain = 1.2;                // what all streams must bring to be used

  // Should chunks go to all streams now (true), or to one while it has room?
  bool all() const { return phase_ == Phase::kTryAll || phase_ == Phase::kAll; }
  // Is there something to tell update()?
  bool due(int64_t now, bool saturated) const { return saturated != saturated_ || now - now_ >= kLookNs; }
  // At time `now` so many bytes to this peer were known to have arrived. `saturated`: chunks wait for a stream. Only
  // time that begins saturated is counted.
  void update(int64_t now, uint64_t arrived, bool saturated);

 private:
  enum class Phase : uint8_t { kTryOne, kTryAll, kOne, kAll };
  void begin(Phase phase, int64_t now);
  double rate() const { return ns_ > 0 ? static_cast<double>(bytes_) / static_cast<double>(ns_) : 0; }
  void decide(int64_t now);

  Phase phase_ = Phase::kTryOne;
  bool saturated_ = false;  // at the last update
  int64_t now_ = 0;
  uint64_t arrived_ = 0;
  int64_t settled_ns_ = 0;  // saturated time of this trial that was not counted
  int64_t ns_ = 0;          // saturated time of this trial, or since the latest look at a held result
  uint64_t bytes_ = 0;
  int64_t held_since_ = 0;
  double one_ = 0, held_ = 0;  // rates measured, bytes per ns
};

}  // namespace bagua
