// kTopK: keeps the largest magnitudes of each block of 16384 elements.
#include <algorithm>
#include <memory>

#include "codec/formats.h"
#include "codec/streams.h"

namespace bagua::codec {
namespace {

constexpr size_t kSampleStep = 16;  // a sample takes one vector of this many

// The largest t such that at least `wanted` magnitudes are t or more. Finds the `bits` bits of t from the highest down.
// `count` is a multiple of kGroup.
int32_t quantile(const int32_t* magnitudes, size_t count, size_t wanted, int bits) {
  int32_t t = 0;
  for (int bit = 30; bit > 30 - bits; --bit) {
    const int32_t tried = t | int32_t{1} << bit;
    I below[4] = {};  // the negated number of magnitudes that reach the threshold
    for (size_t i = 0; i < count; i += kGroup) {
      for (size_t q = 0; q < 4; ++q) below[q] += load<I>(magnitudes + i + q * kLanes) >= tried;
    }
    const I sum = below[0] + below[1] + below[2] + below[3];
    size_t reached = 0;
    for (size_t l = 0; l < kLanes; ++l) reached += static_cast<size_t>(-sum[l]);
    if (reached >= wanted) t = tried;
  }
  return t;
}

// Positions and magnitudes of those elements of a block whose magnitude reaches a threshold, in order of position.
struct Candidates {
  size_t count = 0;
  uint16_t positions[kTopKBlock];
  alignas(64) int32_t magnitudes[kTopKBlock + 64];

  void take(const float* y, size_t from, uint64_t chosen) {
    for (; chosen != 0; chosen &= chosen - 1) {
      const size_t i = from + static_cast<size_t>(__builtin_ctzll(chosen));
      positions[count] = static_cast<uint16_t>(i);
      magnitudes[count++] = bits_of(y[i]) & kMagnitude;
    }
  }

  void collect(const float* y, size_t n, int32_t least) {
    count = 0;
    size_t i = 0;
    for (; i + 64 <= n; i += 64) {
      uint64_t chosen = 0;
      for (size_t l = 0; l < 64; l += kLanes) {
        const I below = (load<I>(y + i + l) & kMagnitude) < least;
        chosen |= uint64_t{sign_bits(below)} << l;
      }
      take(y, i, ~chosen);
    }
    for (; i < n; ++i) take(y, i, (bits_of(y[i]) & kMagnitude) >= least ? 1 : 0);
  }
};

// Working memory, which is too large for the stacks of some threads. It is kept, because the first touch of new memory
// costs more than the work itself.
struct Space {
  Candidates candidates;
  alignas(64) float sum[kTopKBlock];
};

Space& space_of_thread() {
  thread_local const std::unique_ptr<Space> space(new Space);  // not make_unique(), which would zero it
  return *space;
}

class TopK {
 public:
  explicit TopK(const Transcode& work)
      : work_(work), streams_{work, false}, positions_at_(kept_of_all(work.count, work.encoding.density) * 4) {}

  void run() {
    const uint16_t density = work_.encoding.density;
    size_t kept_before = 0;
    for (size_t at = 0; at < work_.count; at += kTopKBlock) {
      const size_t n = std::min(kTopKBlock, work_.count - at);
      const size_t kept = kept_of(n, density);
      block(at, n, kept_before, kept);
      kept_before += kept;
    }
  }

 private:
  void block(size_t at, size_t n, size_t kept_before, size_t kept) {
    const float* y = gather(at, n, kept_before, kept);
    if (work_.message == nullptr) {
      streams_.output(y, at, n);
      return;
    }
    auto* values = static_cast<uint8_t*>(work_.message) + kept_before * 4;
    auto* positions = static_cast<uint8_t*>(work_.message) + positions_at_ + kept_before * 2;
    select(y, n, kept, values, positions);
    if (work_.residual != nullptr) update_residual(y, at, n, kept, positions);
    for (float* const decoded : work_.decoded) {
      float* to = decoded + at;
      std::memset(to, 0, n * sizeof(float));
      for (size_t k = 0; k < kept; ++k) {
        std::memcpy(to + load<uint16_t>(positions + 2 * k), values + 4 * k, sizeof(float));
      }
    }
  }

  const float* gather(size_t at, size_t n, size_t kept_before, size_t kept) {
    const float* y = streams_.sum_raw(at, n, sum_);
    if (y == nullptr) {
      std::fill_n(sum_, n, 0.0f);
      y = sum_;
    } else if (!work_.encoded.empty() && y != sum_) {
      std::memcpy(sum_, y, n * sizeof(float));
      y = sum_;
    }
    for (const void* const message : work_.encoded) add(static_cast<const uint8_t*>(message), n, kept_before, kept);
    if (!streams_.scaled()) return y;
    streams_.scale(y, at, n, sum_);
    return sum_;
  }

  // Adds a block of a message to the sum. Checks positions: they come from another host and may be invalid.
  void add(const uint8_t* message, size_t n, size_t kept_before, size_t kept) {
    const uint8_t* values = message + kept_before * 4;
    const uint8_t* positions = message + positions_at_ + kept_before * 2;
    for (size_t k = 0; k < kept; ++k) {
      const size_t position = load<uint16_t>(positions + 2 * k);
      if (position < n) sum_[position] += load<float>(values + 4 * k);
    }
  }

  // Estimates from a sample a magnitude that slightly more than `kept` elements reach.
  int32_t guess(const float* y, size_t n, size_t kept) {
    const size_t vectors = n / (kLanes * kSampleStep) & ~size_t{3};
    if (vectors * kLanes < 256) return 0;
    for (size_t v = 0; v < vectors; ++v) {
      store(load<I>(y + v * kSampleStep * kLanes) & kMagnitude, candidates_.magnitudes + v * kLanes);
    }
    const size_t sampled = vectors * kLanes;
    const size_t expected = kept * sampled / n;
    const size_t wanted = expected + expected / 4 + 8;
    return wanted >= sampled ? 0 : quantile(candidates_.magnitudes, sampled, wanted, 14);
  }

  void select(const float* y, size_t n, size_t kept, uint8_t* values, uint8_t* positions) {
    Candidates& found = candidates_;
    const int32_t guessed = guess(y, n, kept);
    found.collect(y, n, guessed);
    if (found.count < kept) found.collect(y, n, 0);
    const size_t padded = (found.count + kGroup - 1) / kGroup * kGroup;
    std::fill(found.magnitudes + found.count, found.magnitudes + padded, -1);  // below every threshold
    const int32_t threshold = quantile(found.magnitudes, padded, kept, 31);
    size_t ties = kept;  // elements equal to the threshold that are kept: the first ones
    for (size_t c = 0; c < found.count; ++c) ties -= found.magnitudes[c] > threshold ? 1 : 0;
    size_t k = 0;
    for (size_t c = 0; c < found.count; ++c) {
      const bool tie = found.magnitudes[c] == threshold && ties > 0;
      if (tie) --ties;
      if (!tie && found.magnitudes[c] <= threshold) continue;
      std::memcpy(values + 4 * k, y + found.positions[c], sizeof(float));
      store(found.positions[c], positions + 2 * k);
      ++k;
    }
  }

  // A kept element leaves no residual.
  void update_residual(const float* y, size_t at, size_t n, size_t kept, const uint8_t* positions) {
    float* residual = work_.residual + at;
    each(n, [=](size_t i, auto zero) { store(zero_unless_finite(load<decltype(zero)>(y + i)), residual + i); });
    for (size_t k = 0; k < kept; ++k) residual[load<uint16_t>(positions + 2 * k)] = 0;
  }

  const Transcode& work_;
  const Streams streams_;
  const size_t positions_at_;
  Space& space_ = space_of_thread();
  Candidates& candidates_ = space_.candidates;
  float* const sum_ = space_.sum;
};

}  // namespace

void transcode_top_k(const Transcode& work) {
  TopK(work).run();
}

}  // namespace bagua::codec
