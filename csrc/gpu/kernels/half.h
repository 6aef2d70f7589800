// The 16-bit floating-point types. pack() and unpack() use integer arithmetic and give the bits of kernel/half.cpp,
// also for NaN. Functions with "number" in the name use the device's conversions, one or two instructions; their NaN
// may have any bits.
#pragma once

#include "gpu/kernels/convert.h"

namespace bagua::cuda {

struct Half {
  static BAGUA_DEVICE uint32_t pack(float value) {
    const uint32_t magnitude = magnitude_of(value);
    const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
    const uint32_t subnormal = bits_of(__fadd_rn(float_of(magnitude), 0.5f)) - 0x3f000000u;
    uint32_t result = magnitude >= 0x38800000u ? normal : subnormal;
    if (magnitude >= 0x477ff000u) result = 0x7c00u;  // rounds to 65536 or more
    if (magnitude > kInfinity) result = 0x7e00u | (magnitude >> 13 & 0x3ffu);
    return (bits_of(value) >> 16 & 0x8000u) | result;
  }

  // Moves fraction and exponent to the places of a float, then corrects the exponent by a product, which is exact.
  static BAGUA_DEVICE float unpack(uint32_t half) {
    const uint32_t magnitude = (half & 0x7fffu) << 13;
    uint32_t result = bits_of(__fmul_rn(float_of(magnitude), 0x1p112f));
    if (magnitude >= 0x0f800000u) result = kInfinity | magnitude | (magnitude > 0x0f800000u ? 0x400000u : 0u);
    return float_of(result | (half & 0x8000u) << 16);
  }

  static constexpr bool kUnpacksNaN = false;  // unpack_numbers() keeps the bits of NaN
  static BAGUA_DEVICE uint32_t pack_numbers(float low, float high) { return halves_of(low, high); }
  static BAGUA_DEVICE void unpack_numbers(uint32_t word, float& low, float& high) {
    low = float_of_half(word & 0xffffu);
    high = float_of_half(word >> 16);
  }
  static BAGUA_DEVICE uint32_t pack_number(float value) { return halves_of(value, 0) & 0xffffu; }
  static BAGUA_DEVICE float unpack_number(uint32_t half) { return float_of_half(half); }

  uint16_t bits;
};

BAGUA_DEVICE bool operator<(Half a, Half b) {
  return Half::unpack_number(a.bits) < Half::unpack_number(b.bits);
}
BAGUA_DEVICE bool operator>(Half a, Half b) {
  return b < a;
}
BAGUA_DEVICE bool operator!=(Half a, Half b) {
  return Half::unpack_number(a.bits) != Half::unpack_number(b.bits);
}

struct BFloat16 {
  static BAGUA_DEVICE uint32_t pack(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    return (bits & kMagnitude) > kInfinity ? bits >> 16 | 0x40u : rounded;
  }
  static BAGUA_DEVICE float unpack(uint32_t bits) { return float_of(bits << 16); }

  static constexpr bool kUnpacksNaN = true;
  static BAGUA_DEVICE uint32_t pack_numbers(float low, float high) { return bfloats_of(low, high); }
  static BAGUA_DEVICE void unpack_numbers(uint32_t word, float& low, float& high) {
    low = float_of(word << 16);
    high = float_of(word & 0xffff0000u);
  }
  static BAGUA_DEVICE uint32_t pack_number(float value) { return bfloats_of(value, 0) & 0xffffu; }
  // Packs a float that came from a value of this type, so no rounding is needed.
  static BAGUA_DEVICE uint32_t pack_exact(float value) { return bits_of(value) >> 16 | (value != value ? 0x40u : 0u); }

  uint16_t bits;
};

}  // namespace bagua::cuda
