// kSign1: the sign of every element, and the mean magnitude of each block.
#pragma once

#include "codec/tiles.h"

namespace bagua::codec {

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
    for (size_t i = 0; i < kTile; i += kLanes) {
      F v = float_of(minus(payload, i) | mean);
      if constexpr (add) v = load<F>(base + i) + v;
      store(v, out + i);
    }
  }

 private:
  static constexpr size_t kSums = 32;

  static void signs(const float* y, uint8_t* payload) {
    for (size_t i = 0; i < kTile; i += 32) {
      uint32_t bits = 0;
      for (size_t l = 0; l < 32; l += kLanes) bits |= sign_bits(load<I>(y + i + l)) << l;
      store(bits, payload + i / 8);
    }
  }

  // Adds up 32 sums side by side, then folds halves. The order of additions is the same at every vector width.
  template <bool small>
  static float sum(const float* y) {
    F sums[kSums / kLanes] = {};
    for (size_t i = 0; i < kTile; i += kSums) {
      for (size_t q = 0; q < kSums / kLanes; ++q) {
        F v = float_of(load<I>(y + i + q * kLanes) & kMagnitude);
        if constexpr (small) v = rounded(v * (1.0f / kTile));
        sums[q] += v;
      }
    }
    float lanes[kSums];
    std::memcpy(lanes, sums, sizeof lanes);
    for (size_t half = kSums / 2; half > 0; half /= 2) {
      for (size_t l = 0; l < half; ++l) lanes[l] += lanes[l + half];
    }
    return lanes[0];
  }

  // The mean where the sum has overflowed or an element of the block is not finite.
  static float large_mean(const float* y, size_t n) {
    const int32_t most = largest_magnitude(y, kTile);
    if (most >= kInfinity) return float_of(int32_t{0x7fc00000});
    const float mean = sum<true>(y) / static_cast<float>(n) * kTile;
    return mean < float_of(most) ? mean : float_of(most);
  }

  // Sign bits of elements [i, i + kLanes), each in the top bit of its lane.
  static I minus(const uint8_t* payload, size_t i) {
    using Bytes = I;
    Bytes places;
    int32_t bits;
    if constexpr (kLanes < 8) {
      bits = payload[i / 8] >> (i % 8);
    } else if constexpr (kLanes == 8) {
      bits = payload[i / 8];
    } else {
      bits = load<uint16_t>(payload + i / 8);
    }
    for (size_t l = 0; l < kLanes; ++l) places[l] = 1 << l;
    return ((places & bits) != 0) & INT32_MIN;
  }
};

}  // namespace bagua::codec
