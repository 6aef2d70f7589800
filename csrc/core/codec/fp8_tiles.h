// kE4M3 and kE5M2: 8-bit floating point; each block is scaled by a power of two.
#pragma once

#include "codec/tiles.h"

namespace bagua::codec {

// kFraction: bits of the fraction; kBias: bias of the exponent; kTop: exponent of the largest number, whose significand
// is 1.75; kSpecial: the smallest code that is infinity or NaN; kInfinite: the code of infinity.
template <int kFraction, int kBias, int kTop, int kSpecial, int kInfinite>
struct Fp8Tiles : InPlace {
  static constexpr size_t kTilePayload = kTile;
  static constexpr size_t kBlocks = kTile / kByteBlock;
  static constexpr size_t kTileParameters = kBlocks * sizeof(float);
  static size_t payload_bytes(size_t n) { return n; }
  static size_t parameter_bytes(size_t n) { return blocks_of(n, kByteBlock) * sizeof(float); }

  static void encode(const float* y, size_t, uint8_t* payload, uint8_t* parameters) {
    for (size_t b = 0; b < kBlocks; ++b) {
      const float* block = y + b * kByteBlock;
      int32_t most = largest_magnitude(block, kByteBlock);
      const bool special = most >= kInfinity;
      if (special) most = largest_finite_magnitude(block, kByteBlock);
      const int32_t exponent = scale_exponent(most);
      store(power_of_two(exponent), parameters + b * sizeof(float));
      const float inverse = power_of_two(-exponent);
      const bool brink = most > kBrink;
      if (special || brink) {
        const float limit = float_of(kBrink) * inverse;
        encode_block<true>(block, inverse, brink ? bits_of(limit) : kInfinity, payload + b * kByteBlock);
      } else {
        encode_block<false>(block, inverse, kInfinity, payload + b * kByteBlock);
      }
    }
  }

  template <bool add>
  static void decode(const uint8_t* payload, const uint8_t* parameters, const float* base, float* out) {
    for (size_t i = 0; i < kTile; i += kLanes) {
      const float scale = load<float>(parameters + i / kByteBlock * sizeof(float));
      F v = rounded(value(unpack_bytes(payload + i)) * scale);
      if constexpr (add) v = load<F>(base + i) + v;
      store(v, out + i);
    }
  }

 private:
  static constexpr int kShift = 23 - kFraction;
  static constexpr int32_t kSmallestNormal = (128 - kBias) << 23;  // as the bits of a float
  // The largest float that decoding can give. Larger floats are limited to it: they must not round up to infinity.
  static constexpr int32_t kBrink = 0x7f7fffff - ((1 << kShift) - 1);

  static float power_of_two(int32_t exponent) { return float_of((exponent + 127) << 23); }

  // The smallest exponent of a scale with which the largest magnitude fits.
  static int32_t scale_exponent(int32_t most) {
    const int32_t exponent = (most >> 23) - 127 - kTop + ((most & 0x7fffff) > 0x600000 ? 1 : 0);
    return exponent < -126 ? -126 : exponent;
  }

  // Rounds by an addition: adding 2^kShift times the element's power of two rounds the element to kFraction bits, to
  // nearest even. Subnormal codes use the power of two of the smallest normal number. `special`: some elements may be
  // infinite, NaN or above `limit`.
  template <bool special>
  static I code(F y, float inverse, int32_t limit) {
    const I bits = bits_of(y * inverse);
    const I magnitude = bits & kMagnitude;
    const I finite = special ? lesser(magnitude & (magnitude < kInfinity), I{} + limit) : magnitude;
    const I power = greater(finite & kInfinity, I{} + kSmallestNormal);
    const I magic = power + (kShift << 23);
    const I fraction = bits_of(float_of(finite) + float_of(magic)) - magic;
    I result = fraction + ((power - kSmallestNormal) >> kShift);
    if constexpr (special) {
      result = magnitude == kInfinity ? I{} + kInfinite : result;
      result = magnitude > kInfinity ? I{} + 0x7f : result;
    }
    return result | ((bits >> 24) & 0x80);
  }

  template <bool special>
  static void encode_block(const float* y, float inverse, int32_t limit, uint8_t* to) {
    for (size_t i = 0; i < kByteBlock; i += kGroup) {
      I codes[4];
      for (size_t q = 0; q < 4; ++q) codes[q] = code<special>(load<F>(y + i + q * kLanes), inverse, limit);
      pack_bytes(codes, to + i);
    }
  }

  static F value(I code) {
    const I magnitude = code & 0x7f;
    const I normal = (magnitude << kShift) + ((127 - kBias) << 23);
    // A subnormal code has no hidden bit: adds one to the exponent, then subtracts the hidden bit's value.
    const I subnormal = bits_of(float_of(normal + (1 << 23)) - float_of(I{} + kSmallestNormal));
    I bits = magnitude < (1 << kFraction) ? subnormal : normal;
    bits = magnitude >= kSpecial ? I{} + (kInfinity | 0x400000) : bits;
    if constexpr (kInfinite != 0x7f) bits = magnitude == kInfinite ? I{} + kInfinity : bits;
    return float_of(bits | ((code & 0x80) << 24));
  }
};

using E4M3Tiles = Fp8Tiles<3, 7, 8, 0x7f, 0x7f>;
using E5M2Tiles = Fp8Tiles<2, 15, 15, 0x7c, 0x7c>;

}  // namespace bagua::codec
