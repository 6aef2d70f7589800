// kMinMax8 and kInt4: equidistant levels; each block has its own distance between levels.
#pragma once

#include "codec/tiles.h"

namespace bagua::codec {

constexpr float kSmallest = 0x1p-118f;  // smaller ranges and magnitudes count as 0, because the inverse must be finite
constexpr float kWide = 0x1p126f;       // differences of such magnitudes can overflow
constexpr int32_t kQuietNaN = 0x7fc00000;

// The low bits of v + kRound are v rounded to an integer, to nearest even.
constexpr float kRound = 0x1.8p23f;

// Maps floats to integers in the same order, with -0 before +0, so that the extremes do not depend on the order of
// comparisons. The map is its own inverse.
inline I ordered(I bits) {
  return bits ^ ((bits >> 31) & kMagnitude);
}
inline int32_t ordered(int32_t bits) {
  return bits ^ ((bits >> 31) & kMagnitude);
}

struct MinMaxTiles : InPlace {
  static constexpr size_t kTilePayload = kTile;
  static constexpr size_t kBlocks = kTile / kByteBlock;
  static constexpr size_t kTileParameters = kBlocks * 2 * sizeof(float);
  static size_t payload_bytes(size_t n) { return n; }
  static size_t parameter_bytes(size_t n) { return blocks_of(n, kByteBlock) * 2 * sizeof(float); }

  static void pad(const float* y, size_t n, float* out) {
    std::memcpy(out, y, n * sizeof(float));
    for (size_t i = n; i < kTile; ++i) out[i] = y[n - 1];  // padding that does not change the extremes
  }

  static void encode(const float* y, size_t, uint8_t* payload, uint8_t* parameters) {
    for (size_t b = 0; b < kBlocks; ++b) {
      encode_block(y + b * kByteBlock, payload + b * kByteBlock, parameters + b * 2 * sizeof(float));
    }
  }

  template <bool add>
  static void decode(const uint8_t* payload, const uint8_t* parameters, const float* base, float* out) {
    for (size_t b = 0; b < kBlocks; ++b) {
      const float low = load<float>(parameters + b * 2 * sizeof(float));
      const float signed_step = load<float>(parameters + b * 2 * sizeof(float) + sizeof(float));
      const bool halved = signed_step < 0;
      const float step = halved ? -signed_step : signed_step;
      for (size_t i = b * kByteBlock; i < (b + 1) * kByteBlock; i += kLanes) {
        const F level = float_from(unpack_bytes(payload + i));
        F v = rounded(level * step) + low;
        if (halved) v += v;
        if constexpr (add) v = load<F>(base + i) + v;
        store(v, out + i);
      }
    }
  }

 private:
  struct Extremes {
    float low;
    float high;
  };

  static Extremes extremes(const float* y) {
    I low[2] = {ordered(load<I>(y)), ordered(load<I>(y + kLanes))};
    I high[2] = {low[0], low[1]};
    for (size_t i = 0; i < kByteBlock; i += 2 * kLanes) {
      for (size_t q = 0; q < 2; ++q) {
        const I v = ordered(load<I>(y + i + q * kLanes));
        low[q] = lesser(low[q], v);
        high[q] = greater(high[q], v);
      }
    }
    return {float_of(ordered(least(lesser(low[0], low[1])))), float_of(ordered(greatest(greater(high[0], high[1]))))};
  }

  static bool finite(float v) { return (bits_of(v) & kInfinity) != kInfinity; }

  static void encode_block(const float* y, uint8_t* payload, uint8_t* parameters) {
    auto [low, high] = extremes(y);
    float step = 0;
    float inverse = 0;
    if (!finite(low) || !finite(high)) {
      low = step = float_of(kQuietNaN);
      std::memset(payload, 0, kByteBlock);
    } else if (low > -kWide && high < kWide) {
      const float range = high - low;
      if (range >= kSmallest) {
        step = range / 255;
        inverse = 255 / range;
      }
      quantize<false>(y, low, inverse, payload);
    } else {
      low *= 0.5f;
      const float range = high * 0.5f - low;
      if (range >= kSmallest) {
        inverse = 255 / range;
        step = range / 255 * (1 - 0x1p-20f);  // the highest level must not overflow when it is doubled
      }
      quantize<true>(y, low, inverse, payload);
      step = -step;
      if (range == 0) low *= 2;  // a constant block: step is 0 and can't mark that it was halved
    }
    store(low, parameters);
    store(step, parameters + sizeof(float));
  }

  template <bool halved>
  static void quantize(const float* y, float low, float inverse, uint8_t* to) {
    for (size_t i = 0; i < kByteBlock; i += kGroup) {
      I levels[4];
      for (size_t q = 0; q < 4; ++q) {
        F v = load<F>(y + i + q * kLanes);
        if constexpr (halved) v = rounded(v * 0.5f);
        levels[q] = bits_of(rounded((v - low) * inverse) + kRound) & 0xff;
      }
      pack_bytes(levels, to + i);
    }
  }
};

// Byte j of a block holds element j in its low four bits and element j + half in its high ones. half is 64, in an
// incomplete block of n elements (n + 1) / 2.
struct Int4Tiles {
  static constexpr size_t kHalf = kNibbleBlock / 2;
  static constexpr size_t kTilePayload = kTile / 2;
  static constexpr size_t kBlocks = kTile / kNibbleBlock;
  static constexpr size_t kTileParameters = kBlocks * sizeof(float);
  static size_t payload_bytes(size_t n) { return n / 2 + n % 2; }
  static size_t parameter_bytes(size_t n) { return blocks_of(n, kNibbleBlock) * sizeof(float); }

  static void pad(const float* y, size_t n, float* out) {
    const auto [whole, first, second] = places(n);
    std::memset(out, 0, kTile * sizeof(float));
    std::memcpy(out, y, (whole + first) * sizeof(float));
    std::memcpy(out + whole + kHalf, y + whole + first, second * sizeof(float));
  }
  static void unpad(const float* in, size_t n, float* out) {
    const auto [whole, first, second] = places(n);
    std::memcpy(out, in, (whole + first) * sizeof(float));
    std::memcpy(out + whole + first, in + whole + kHalf, second * sizeof(float));
  }

  static void encode(const float* y, size_t, uint8_t* payload, uint8_t* parameters) {
    for (size_t b = 0; b < kBlocks; ++b) {
      const float step = encode_block(y + b * kNibbleBlock, payload + b * kHalf);
      store(step, parameters + b * sizeof(float));
    }
  }

  template <bool add>
  static void decode(const uint8_t* payload, const uint8_t* parameters, const float* base, float* out) {
    const auto put = [base, out](size_t i, I level, float step) {
      F v = rounded(float_from(level - 8) * step);
      if constexpr (add) v = load<F>(base + i) + v;
      store(v, out + i);
    };
    for (size_t b = 0; b < kBlocks; ++b) {
      const float step = load<float>(parameters + b * sizeof(float));
      for (size_t i = 0; i < kHalf; i += kLanes) {
        const I both = unpack_bytes(payload + b * kHalf + i);
        put(b * kNibbleBlock + i, both & 15, step);
        put(b * kNibbleBlock + kHalf + i, both >> 4, step);
      }
    }
  }

 private:
  // How many elements of an incomplete tile lie in whole blocks, and in each half of the incomplete block.
  struct Places {
    size_t whole, first, second;
  };
  static Places places(size_t n) {
    const size_t rest = n % kNibbleBlock;
    return {n - rest, (rest + 1) / 2, rest / 2};
  }

  static float encode_block(const float* y, uint8_t* to) {
    const int32_t most = largest_magnitude(y, kNibbleBlock);
    float step = 0;
    float inverse = 0;
    if (most >= kInfinity) {
      std::memset(to, 0, kHalf);
      return float_of(kQuietNaN);
    }
    if (float_of(most) >= kSmallest) {
      step = float_of(most) / 7;
      inverse = 7 / float_of(most);
    }
    const auto level = [inverse](F v) { return bits_of(rounded(v * inverse) + (kRound + 8)) & 15; };
    for (size_t i = 0; i < kHalf; i += kGroup) {
      I both[4];
      for (size_t q = 0; q < 4; ++q) {
        const float* at = y + i + q * kLanes;
        both[q] = level(load<F>(at)) | level(load<F>(at + kHalf)) << 4;
      }
      pack_bytes(both, to + i);
    }
    return step;
  }
};

}  // namespace bagua::codec
