// The 16-bit floating-point types as bits. pack() and unpack(): in integers, where the device's own conversions make
// every NaN the same; the bits are those of kernel/half.cpp.
#pragma once

#include "cuda/device.h"

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

  // Fraction and exponent at a float's places, then the exponent put right by a product, which is exact.
  static BAGUA_DEVICE float unpack(uint32_t half) {
    const uint32_t magnitude = (half & 0x7fffu) << 13;
    uint32_t result = bits_of(__fmul_rn(float_of(magnitude), 0x1p112f));
    if (magnitude >= 0x0f800000u) result = kInfinity | magnitude | (magnitude > 0x0f800000u ? 0x400000u : 0u);
    return float_of(result | (half & 0x8000u) << 16);
  }

  // The device's own, a quarter of the instructions: for sums and products, where a NaN may be any, and comparisons.
  static BAGUA_DEVICE uint32_t pack_number(float value) {
#if defined(__CUDACC__)
    uint16_t half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
    return half;
#else
    return magnitude_of(value) > kInfinity ? 0x7fffu : pack(value);
#endif
  }
  static BAGUA_DEVICE float unpack_number(uint32_t half) {
#if defined(__CUDACC__)
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<uint16_t>(half)));
    return value;
#else
    return (half & 0x7fffu) > 0x7c00u ? float_of(kMagnitude) : unpack(half);
#endif
  }

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

  uint16_t bits;
};

}  // namespace bagua::cuda
