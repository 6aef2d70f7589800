// kSign1 and kInt2: the sign of every element, and one or two mean magnitudes of each block.
#pragma once

#include <bitset>

#include "codec/tiles.h"

namespace bagua::codec {

constexpr size_t kSums = kWordElements / kLanes;  // vectors of 32 sums side by side

// Adds up 32 sums side by side. The order of additions is the same at every vector width.
inline float folded(const F (&sums)[kSums]) {
  float lanes[kWordElements];
  std::memcpy(lanes, sums, sizeof lanes);
  for (size_t half = kWordElements / 2; half > 0; half /= 2) {
    for (size_t l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  }
  return lanes[0];
}

// Bits [i, i + kLanes) of a word, each in all bits of its lane.
inline I spread(uint32_t word, size_t i) {
  I places;
  for (size_t l = 0; l < kLanes; ++l) places[l] = 1 << l;
  return (places & static_cast<int32_t>(word >> i)) != 0;
}

struct SignTiles : InPlace {
  static constexpr size_t kTilePayload = kTile / 8;
  static constexpr size_t kTileParameters = sizeof(float);
  static size_t payload_bytes(size_t n) { return n / 8 + (n % 8 != 0 ? 1 : 0); }
  static size_t parameter_bytes(size_t n) { return blocks_of(n, kTile) * sizeof(float); }

  static void encode(const float* y, size_t n, uint8_t* payload, uint8_t* parameters) {
    signs(y, payload);
    float mean = sum<false>(y) / static_cast<float>(n);
    if ((bits_of(mean) & kInfinity) == kInfinity) mean = large_mean(y, n);
    store(mean, parameters);
  }

  template <bool add>
  static void decode(const uint8_t* payload, const uint8_t* parameters, const float* base, float* out) {
    const int32_t mean = load<int32_t>(parameters);
    for (size_t i = 0; i < kTile; i += kWordElements) {
      const auto negative = load<uint32_t>(payload + i / 8);
      for (size_t l = 0; l < kWordElements; l += kLanes) {
        F v = float_of((spread(negative, l) & INT32_MIN) | mean);
        if constexpr (add) v = load<F>(base + i + l) + v;
        store(v, out + i + l);
      }
    }
  }

 private:
  static void signs(const float* y, uint8_t* payload) {
    for (size_t i = 0; i < kTile; i += kWordElements) {
      uint32_t bits = 0;
      for (size_t l = 0; l < kWordElements; l += kLanes) bits |= sign_bits(load<I>(y + i + l)) << l;
      store(bits, payload + i / 8);
    }
  }

  template <bool small>
  static float sum(const float* y) {
    F sums[kSums] = {};
    for (size_t i = 0; i < kTile; i += kWordElements) {
      for (size_t q = 0; q < kSums; ++q) {
        F v = float_of(load<I>(y + i + q * kLanes) & kMagnitude);
        if constexpr (small) v = rounded(v * (1.0f / kTile));
        sums[q] += v;
      }
    }
    return folded(sums);
  }

  // The mean where the sum has overflowed or an element of the block is not finite.
  static float large_mean(const float* y, size_t n) {
    const int32_t most = largest_magnitude(y, kTile);
    if (most >= kInfinity) return float_of(int32_t{0x7fc00000});
    const float mean = sum<true>(y) / static_cast<float>(n) * kTile;
    return mean < float_of(most) ? mean : float_of(most);
  }
};

// Large elements and the others of a block decode to the means of their magnitudes.
struct Int2Tiles : InPlace {
  static constexpr size_t kPair = 2 * sizeof(uint32_t);  // a word of signs, then a word that tells which are large
  static constexpr size_t kTilePayload = kTile / kWordElements * kPair;
  static constexpr size_t kTileParameters = 2 * sizeof(float);
  static size_t payload_bytes(size_t n) { return blocks_of(n, kWordElements) * kPair; }
  static size_t parameter_bytes(size_t n) { return blocks_of(n, kTile) * kTileParameters; }

  static void encode(const float* y, size_t n, uint8_t* payload, uint8_t* parameters) {
    F all[kSums] = {}, small[kSums] = {}, large[kSums] = {};  // of magnitudes, shrunk
    for (size_t i = 0; i < kTile; i += kWordElements) {
      for (size_t q = 0; q < kSums; ++q) all[q] += shrunk(load<I>(y + i + q * kLanes));
    }
    const float mean = folded(all) / static_cast<float>(n);
    const float threshold = mean * kThreshold;
    size_t count = 0;  // of large ones
    for (size_t i = 0; i < kTile; i += kWordElements) {
      uint32_t pair[2] = {};
      for (size_t q = 0; q < kSums; ++q) {
        const I bits = load<I>(y + i + q * kLanes);
        const F magnitude = shrunk(bits);
        const I above = magnitude > threshold;
        small[q] += float_of(bits_of(magnitude) & ~above);
        large[q] += float_of(bits_of(magnitude) & above);
        pair[0] |= sign_bits(bits) << (q * kLanes);
        pair[1] |= sign_bits(above) << (q * kLanes);
      }
      count += std::bitset<kWordElements>(pair[1]).count();
      std::memcpy(payload + i / kWordElements * kPair, pair, kPair);
    }
    float means[2] = {grown_mean(folded(small), n - count), grown_mean(folded(large), count)};
    if (mean < kLeastMean * kShrink) means[0] = means[1] = 0;
    // No sum of finite magnitudes is infinite.
    if ((bits_of(mean) & kInfinity) == kInfinity) means[0] = means[1] = float_of(int32_t{0x7fc00000});
    std::memcpy(parameters, means, sizeof means);
  }

  template <bool add>
  static void decode(const uint8_t* payload, const uint8_t* parameters, const float* base, float* out) {
    const int32_t small = load<int32_t>(parameters);
    const int32_t large = load<int32_t>(parameters + sizeof(float));
    for (size_t i = 0; i < kTile; i += kWordElements) {
      const uint8_t* pair = payload + i / kWordElements * kPair;
      const auto negative = load<uint32_t>(pair), above = load<uint32_t>(pair + sizeof(uint32_t));
      for (size_t l = 0; l < kWordElements; l += kLanes) {
        F v = float_of(((spread(above, l) & (small ^ large)) ^ small) | (spread(negative, l) & INT32_MIN));
        if constexpr (add) v = load<F>(base + i + l) + v;
        store(v, out + i + l);
      }
    }
  }

 private:
  static F shrunk(I bits) { return rounded(float_of(bits & kMagnitude) * kShrink); }
  static float grown_mean(float sum, size_t count) {
    return std::min(sum / static_cast<float>(std::max<size_t>(count, 1)) * (1 / kShrink), kLargest);
  }
};

}  // namespace bagua::codec
