// Codecs fp8_e4m3 and fp8_e5m2: 8-bit floating point; each unit is scaled by a power of two. See codec/fp8_tiles.h.
#pragma once

#include "gpu/kernels/convert.h"
#include "gpu/kernels/units.h"

namespace bagua::cuda {

// Bits of the largest finite magnitude among the warp's elements.
BAGUA_DEVICE uint32_t largest_finite_magnitude(const float (&y)[kOwned]) {
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < kOwned; ++i) most = max(most, finite(y[i]) ? magnitude_of(y[i]) : 0u);
  return __reduce_max_sync(kAllLanes, most);
}

// kFraction: bits of the fraction; kBias: bias of the exponent; kTop: exponent of the largest number, whose significand
// is 1.75; kSpecial: the smallest code that is infinity or NaN; kInfinite: the code of infinity.
template <int kFraction, int kBias, int kTop, uint32_t kSpecial, uint32_t kInfinite>
struct Fp8 {
  static constexpr int kWords = kQuads;
  static constexpr int kVector = 1;
  static constexpr int kParameters = 1;
  static constexpr int kBatch = 2;
  static BAGUA_DEVICE uint32_t payload_bytes(uint32_t n) { return n; }
  static BAGUA_DEVICE uint32_t element(uint32_t, uint32_t place) { return place; }
  static BAGUA_DEVICE int parameters(uint32_t) { return 1; }

  template <bool whole>
  static BAGUA_DEVICE void encode(const float (&y)[kOwned], uint32_t, uint32_t, Coded<Fp8>& coded) {
    uint32_t most = largest_magnitude<kOwned>(y);
    const bool special = most >= kInfinity;
    if (special) most = largest_finite_magnitude(y);
    const int exponent = scale_exponent(most);
    coded.parameters[0] = power_of_two(exponent);
    const float inverse = power_of_two(-exponent);
    const bool brink = most > kBrink;
    if (kConvertsFp8 && !special && !brink) {
#pragma unroll
      for (int q = 0; q < kQuads; ++q) coded.words[q] = converted(y + 4 * q, inverse);
    } else {
      const uint32_t limit = brink ? bits_of(__fmul_rn(float_of(kBrink), inverse)) : kInfinity;
#pragma unroll
      for (int q = 0; q < kQuads; ++q) coded.words[q] = calculated(y + 4 * q, inverse, limit);
    }
  }

  // The product with the scale turns every NaN into the same NaN.
  static BAGUA_DEVICE void decode(const Coded<Fp8>& coded, uint32_t, float (&y)[kOwned]) {
    const float scale = coded.parameters[0];
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      decode_pair<0>(coded.words[q], scale, y + 4 * q);
      decode_pair<1>(coded.words[q], scale, y + 4 * q + 2);
    }
  }

 private:
  static constexpr int kShift = 23 - kFraction;
  static constexpr uint32_t kSmallestNormal = (128u - kBias) << 23;  // as the bits of a float
  // The largest float that decoding can give. Larger floats are limited to it: they must not round up to infinity.
  static constexpr uint32_t kBrink = 0x7f7fffffu - ((1u << kShift) - 1);

  static BAGUA_DEVICE float power_of_two(int exponent) { return float_of(static_cast<uint32_t>(exponent + 127) << 23); }

  // The smallest exponent of a scale with which the largest magnitude fits.
  static BAGUA_DEVICE int scale_exponent(uint32_t most) {
    const int exponent = static_cast<int>(most >> 23) - 127 - kTop + ((most & 0x7fffffu) > 0x600000u ? 1 : 0);
    return max(exponent, -126);
  }

  // Four codes of elements that are all finite and within the range of the format.
  static BAGUA_DEVICE uint32_t converted(const float* v, float inverse) {
    return __byte_perm(fp8_of<kFraction>(__fmul_rn(v[0], inverse), __fmul_rn(v[1], inverse)),
                       fp8_of<kFraction>(__fmul_rn(v[2], inverse), __fmul_rn(v[3], inverse)), 0x5410);
  }

  // Four codes of any elements.
  static BAGUA_DEVICE uint32_t calculated(const float* v, float inverse, uint32_t limit) {
    return pack_bytes(code(v[0], inverse, limit), code(v[1], inverse, limit), code(v[2], inverse, limit),
                      code(v[3], inverse, limit));
  }

  // Rounds by an addition: adding 2^kShift times the element's power of two rounds the element to kFraction bits, to
  // nearest even. Subnormal codes use the power of two of the smallest normal number. Finite elements above `limit`
  // become `limit`.
  static BAGUA_DEVICE uint32_t code(float y, float inverse, uint32_t limit) {
    const uint32_t magnitude = magnitude_of(__fmul_rn(y, inverse));
    const uint32_t number = min(magnitude < kInfinity ? magnitude : 0u, limit);
    const uint32_t power = max(number & kInfinity, kSmallestNormal);
    const uint32_t magic = power + (static_cast<uint32_t>(kShift) << 23);
    const uint32_t fraction = bits_of(__fadd_rn(float_of(number), float_of(magic))) - magic;
    uint32_t result = fraction + ((power - kSmallestNormal) >> kShift);
    if (magnitude == kInfinity) result = kInfinite;
    if (magnitude > kInfinity) result = 0x7fu;
    return result | (bits_of(y) >> 24 & 0x80u);  // not the sign of the product, which does not keep that of NaN
  }

  // Decodes codes 2 * pair and 2 * pair + 1 of a word.
  template <int pair>
  static BAGUA_DEVICE void decode_pair(uint32_t word, float scale, float* y) {
    if constexpr (kConvertsFp8 || kFraction == 2) {
      const uint32_t halves = halves_of_fp8<kFraction, pair>(word);
      y[0] = __fmul_rn(float_of_half(halves & 0xffffu), scale);
      y[1] = __fmul_rn(float_of_half(halves >> 16), scale);
    } else {
      y[0] = __fmul_rn(value<2 * pair>(word), scale);
      y[1] = __fmul_rn(value<2 * pair + 1>(word), scale);
    }
  }

  // Decodes byte `c`: moves sign, exponent and fraction to the places of a float, then corrects the exponent by a
  // product, which is exact. Codes from kSpecial on get the largest exponent, so that they become infinite or NaN.
  template <int c>
  static BAGUA_DEVICE float value(uint32_t word) {
    constexpr uint32_t kBits = ~kMagnitude | 0x7fu << kShift;
    constexpr uint32_t kFirstSpecial = (kSpecial << kShift) + ((127u - kBias) << 23);
    const int at_top = static_cast<int>(word << (24 - 8 * c));
    const uint32_t bits = static_cast<uint32_t>(at_top >> (24 - kShift)) & kBits;
    const float v = __fmul_rn(float_of(bits), float_of((254u - kBias) << 23));
    return magnitude_of(v) >= kFirstSpecial ? float_of(bits_of(v) | kInfinity) : v;
  }
};

using E4M3 = Fp8<3, 7, 8, 0x7f, 0x7f>;
using E5M2 = Fp8<2, 15, 15, 0x7c, 0x7c>;

}  // namespace bagua::cuda
