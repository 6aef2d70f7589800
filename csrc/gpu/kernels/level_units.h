// Codecs minmax8 and int4: equidistant levels; each block has its own distance between levels. See
// codec/level_tiles.h.
#pragma once

#include "gpu/kernels/units.h"

namespace bagua::cuda {

constexpr float kSmallest = 0x1p-118f;  // smaller ranges and magnitudes count as 0, because the inverse must be finite
constexpr float kWide = 0x1p126f;       // differences of such magnitudes can overflow
constexpr float kRound = 0x1.8p23f;     // the low bits of v + kRound are v rounded to an integer, to nearest even

// Maps floats to integers in the same order, with -0 before +0. The map is its own inverse.
BAGUA_DEVICE int ordered(int bits) {
  return bits ^ ((bits >> 31) & static_cast<int>(kMagnitude));
}
BAGUA_DEVICE float from_ordered(int v) {
  return float_of(static_cast<uint32_t>(ordered(v)));
}

struct MinMax {
  static constexpr int kWords = kQuads;
  static constexpr int kVector = 1;
  static constexpr int kParameters = 2;
  static constexpr int kBatch = 2;
  static BAGUA_DEVICE uint32_t payload_bytes(uint32_t n) { return n; }
  static BAGUA_DEVICE uint32_t element(uint32_t, uint32_t place) { return place; }
  static BAGUA_DEVICE int parameters(uint32_t) { return 2; }

  template <bool whole>
  static BAGUA_DEVICE void encode(const float (&y)[kOwned], uint32_t n, uint32_t lane, Coded<MinMax>& coded) {
    float low;
    float high;
    extremes<whole>(y, n, lane, low, high);
    float step = 0;
    float inverse = 0;
    if (!finite(low) || !finite(high)) {
      low = step = float_of(kQuietNaN);
#pragma unroll
      for (int w = 0; w < kWords; ++w) coded.words[w] = 0;
    } else if (low > -kWide && high < kWide) {
      const float range = __fsub_rn(high, low);
      if (range >= kSmallest) {
        step = __fdiv_rn(range, 255.0f);
        inverse = __fdiv_rn(255.0f, range);
      }
      quantize<false>(y, low, inverse, coded);
    } else {
      low = __fmul_rn(low, 0.5f);
      const float range = __fsub_rn(__fmul_rn(high, 0.5f), low);
      if (range >= kSmallest) {
        inverse = __fdiv_rn(255.0f, range);
        // The highest level must not overflow when it is doubled.
        step = __fmul_rn(__fdiv_rn(range, 255.0f), 1 - 0x1p-20f);
      }
      quantize<true>(y, low, inverse, coded);
      step = -step;
      if (range == 0) low = __fmul_rn(low, 2.0f);  // a constant block: step is 0 and can't mark that it was halved
    }
    coded.parameters[0] = low;
    coded.parameters[1] = step;
  }

  static BAGUA_DEVICE void decode(const Coded<MinMax>& coded, uint32_t, float (&y)[kOwned]) {
    const float step = coded.parameters[1];
    if (!(step < 0)) {
      decode_levels<false>(coded, step, y);
    } else {
      decode_levels<true>(coded, -step, y);
    }
  }

 private:
  template <bool halved>
  static BAGUA_DEVICE void decode_levels(const Coded<MinMax>& coded, float step, float (&y)[kOwned]) {
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      y[4 * q] = large_from_byte<0>(coded.words[q]);
      y[4 * q + 1] = large_from_byte<1>(coded.words[q]);
      y[4 * q + 2] = large_from_byte<2>(coded.words[q]);
      y[4 * q + 3] = large_from_byte<3>(coded.words[q]);
    }
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
      const float v = __fadd_rn(__fmul_rn(__fsub_rn(y[i], 0x1p23f), step), coded.parameters[0]);
      y[i] = halved ? __fadd_rn(v, v) : v;
    }
  }

  // Minimum and maximum of the block. At least one of them is NaN if an element is.
  template <bool whole>
  static BAGUA_DEVICE void extremes(const float (&y)[kOwned], uint32_t n, uint32_t lane, float& low, float& high) {
    if constexpr (whole) {
      low = high = y[0];
#pragma unroll
      for (int i = 1; i < kOwned; ++i) {
        low = min_or_nan(low, y[i]);
        high = max_or_nan(high, y[i]);
      }
      of_warp(ordered(static_cast<int>(bits_of(low))), ordered(static_cast<int>(bits_of(high))), low, high);
      if (low != 0) return;  // the sign matters only if low is zero
    }
    int least = INT32_MAX;
    int most = INT32_MIN;
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
      const uint32_t place = 128 * static_cast<uint32_t>(i / 4) + 4 * lane + static_cast<uint32_t>(i % 4);
      if (!whole && place >= n) continue;
      const int v = ordered(static_cast<int>(bits_of(y[i])));
      least = min(least, v);
      most = max(most, v);
    }
    of_warp(least, most, low, high);
  }

  static BAGUA_DEVICE void of_warp(int least, int most, float& low, float& high) {
    low = from_ordered(__reduce_min_sync(kAllLanes, least));
    high = from_ordered(__reduce_max_sync(kAllLanes, most));
  }

  template <bool halved>
  static BAGUA_DEVICE uint32_t level(float v, float low, float inverse) {
    if constexpr (halved) v = __fmul_rn(v, 0.5f);
    return bits_of(__fadd_rn(__fmul_rn(__fsub_rn(v, low), inverse), kRound));
  }

  template <bool halved>
  static BAGUA_DEVICE void quantize(const float (&y)[kOwned], float low, float inverse, Coded<MinMax>& coded) {
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      const float* v = y + 4 * q;
      coded.words[q] = pack_bytes(level<halved>(v[0], low, inverse), level<halved>(v[1], low, inverse),
                                  level<halved>(v[2], low, inverse), level<halved>(v[3], low, inverse));
    }
  }
};

// The lane's q-th four places belong to block q of the unit. Byte j of a block holds element j in its low four bits and
// element j + 64 in its high ones; these belong to lanes l < 16 and l + 16. The two lanes exchange levels of two
// blocks, so that each has one whole word: the lower lane that of the even block, the upper lane that of the odd one.
// Word 0 is of blocks 0 and 1, word 1 of blocks 2 and 3.
struct Int4 {
  static constexpr int kWords = kQuads / 2;
  static constexpr int kVector = 1;
  static constexpr int kParameters = kQuads;
  static constexpr int kBatch = 2;
  static BAGUA_DEVICE uint32_t payload_bytes(uint32_t n) { return n / 2 + n % 2; }
  static BAGUA_DEVICE int parameters(uint32_t n) { return static_cast<int>((n + 127) / 128); }

  // In a last block of n elements the second half begins with element (n + 1) / 2, but it is at place 64, too.
  static BAGUA_DEVICE uint32_t element(uint32_t n, uint32_t place) {
    const uint32_t block = place & ~127u;
    const uint32_t in_block = n > block ? min(n - block, 128u) : 0u;
    const uint32_t first = (in_block + 1) / 2;
    const uint32_t j = place % 64;
    if (place % 128 < 64) return j < first ? block + j : n;
    return first + j < in_block ? block + first + j : n;
  }

  template <bool whole>
  static BAGUA_DEVICE void encode(const float (&y)[kOwned], uint32_t, uint32_t lane, Coded<Int4>& coded) {
    uint32_t most[kQuads];
#pragma unroll
    for (int q = 0; q < kQuads; ++q) most[q] = largest_magnitude<4>(y + 4 * q);
    // Lane q computes the division for block q, because a division takes as long as the other work on the elements.
    const uint32_t of_pair[] = {(lane & 1) != 0 ? most[1] : most[0], (lane & 1) != 0 ? most[3] : most[2]};
    float inverse = 0;
    const float step = divide((lane & 2) != 0 ? of_pair[1] : of_pair[0], inverse);
    uint32_t levels[kQuads];  // one byte per level
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      coded.parameters[q] = __shfl_sync(kAllLanes, step, q);
      const uint32_t of_block = levels_of(y + 4 * q, __shfl_sync(kAllLanes, inverse, q));
      levels[q] = most[q] < kInfinity ? of_block : 0u;
    }
    const bool lower = lane < 16;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const uint32_t even = levels[2 * w];
      const uint32_t odd = levels[2 * w + 1];
      const uint32_t other = __shfl_xor_sync(kAllLanes, lower ? odd : even, 16);
      coded.words[w] = lower ? even | other << 4 : other | odd << 4;
    }
  }

  static BAGUA_DEVICE void decode(const Coded<Int4>& coded, uint32_t lane, float (&y)[kOwned]) {
    const bool lower = lane < 16;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const uint32_t low = coded.words[w] & 0x0f0f0f0fu;
      const uint32_t high = coded.words[w] >> 4 & 0x0f0f0f0fu;
      const uint32_t other = __shfl_xor_sync(kAllLanes, lower ? high : low, 16);
      decode_block(lower ? low : other, coded.parameters[2 * w], y + 8 * w);
      decode_block(lower ? other : high, coded.parameters[2 * w + 1], y + 8 * w + 4);
    }
  }

 private:
  // Step of a block with this largest magnitude (NaN if that is not finite), and the inverse.
  static BAGUA_DEVICE float divide(uint32_t most, float& inverse) {
    if (most >= kInfinity) return float_of(kQuietNaN);
    if (float_of(most) < kSmallest) return 0.0f;
    inverse = __fdiv_rn(7.0f, float_of(most));
    return __fdiv_rn(float_of(most), 7.0f);
  }

  // Four levels of the lane, one byte each.
  static BAGUA_DEVICE uint32_t levels_of(const float* y, float inverse) {
    return pack_bytes(level(y[0], inverse), level(y[1], inverse), level(y[2], inverse), level(y[3], inverse)) &
           0x0f0f0f0fu;
  }

  static BAGUA_DEVICE uint32_t level(float v, float inverse) {
    return bits_of(__fadd_rn(__fmul_rn(v, inverse), kRound + 8));
  }

  static BAGUA_DEVICE void decode_block(uint32_t levels, float step, float* y) {
    y[0] = __fmul_rn(__fsub_rn(large_from_byte<0>(levels), 0x1p23f + 8), step);
    y[1] = __fmul_rn(__fsub_rn(large_from_byte<1>(levels), 0x1p23f + 8), step);
    y[2] = __fmul_rn(__fsub_rn(large_from_byte<2>(levels), 0x1p23f + 8), step);
    y[3] = __fmul_rn(__fsub_rn(large_from_byte<3>(levels), 0x1p23f + 8), step);
  }
};

}  // namespace bagua::cuda
