// Converts between float32 and smaller floats by the device's own instructions: one instruction for two numbers,
// instead of ten to thirty by integer arithmetic. Numbers and infinities get the bits of kernel/half.cpp and
// codec/fp8_tiles.h. All NaN become the same NaN (floats: 0x7fffffff); half.h converts by integer arithmetic if NaN
// must keep their bits.
#pragma once

#include "gpu/kernels/device.h"

#if !defined(__CUDACC__)
#include "conversions.h"  // from the tests' emulation of a device
#endif

namespace bagua::cuda {

// Converts two numbers to nearest even, into the halves of a word.
BAGUA_DEVICE uint32_t halves_of(float low, float high) {
#if defined(__CUDACC__)
  uint32_t word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
#else
  return emulation::half_of(low) | emulation::half_of(high) << 16;
#endif
}

BAGUA_DEVICE float float_of_half(uint32_t half) {
#if defined(__CUDACC__)
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<uint16_t>(half)));
  return value;
#else
  return emulation::of_half(half & 0xffffu);
#endif
}

BAGUA_DEVICE uint32_t bfloats_of(float low, float high) {
#if defined(__CUDACC__)
  uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
#else
  return emulation::bfloat_of(low) | emulation::bfloat_of(high) << 16;
#endif
}

// fp8 with two fraction bits (e5m2) or three (e4m3). Larger numbers become the largest number of the format.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
constexpr bool kConvertsFp8 = false;
#else
constexpr bool kConvertsFp8 = true;
#endif

// Two codes, in the low half of a word.
template <int kFraction>
BAGUA_DEVICE uint32_t fp8_of(float low, float high) {
#if !defined(__CUDACC__)
  return emulation::fp8_of<kFraction>(low) | emulation::fp8_of<kFraction>(high) << 8;
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t codes;
  if constexpr (kFraction == 3) {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  }
  return codes;
#else
  return 0;
#endif
}

// Converts codes 2 * pair and 2 * pair + 1 of a word to halves, which can hold every code exactly.
template <int kFraction, int pair>
BAGUA_DEVICE uint32_t halves_of_fp8(uint32_t word) {
  if constexpr (kFraction == 2) {
    return __byte_perm(word, 0, pair == 0 ? 0x1404 : 0x3424);  // a half whose low bits are 0
  } else {
#if !defined(__CUDACC__)
    return emulation::halves_of_e4m3(word >> (16 * pair));
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(word >> (16 * pair))));
    return halves;
#else
    return 0;
#endif
  }
}

}  // namespace bagua::cuda
