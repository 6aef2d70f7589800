// A device's conversions of numbers, written for clarity.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace emulation {

// Code of a floating-point format, to nearest even, subnormal ones too. `largest`: the code of the largest number;
// `over`: what is larger, infinity as well; `nan`: every NaN.
template <int kExponent, int kFraction>
inline uint32_t narrowed(float v, uint32_t largest, uint32_t over, uint32_t nan) {
  constexpr int kBias = (1 << (kExponent - 1)) - 1;
  if (v != v) return nan;
  const uint32_t sign = std::signbit(v) ? 1u << (kExponent + kFraction) : 0;
  if (v == 0) return sign;
  if (std::isinf(v)) return sign | over;
  const int exponent = std::max(std::ilogb(v), 1 - kBias);
  const double steps = std::nearbyint(std::ldexp(std::fabs(static_cast<double>(v)), kFraction - exponent));
  const uint32_t code = (static_cast<uint32_t>(exponent + kBias - 1) << kFraction) + static_cast<uint32_t>(steps);
  return sign | (code > largest ? over : code);
}

inline uint32_t half_of(float v) {
  return narrowed<5, 10>(v, 0x7bff, 0x7c00, 0x7fff);
}
inline uint32_t bfloat_of(float v) {
  return narrowed<8, 7>(v, 0x7f7f, 0x7f80, 0x7fff);
}
// The largest number stands for more.
template <int kFraction>
inline uint32_t fp8_of(float v) {
  constexpr uint32_t kLargest = kFraction == 3 ? 0x7e : 0x7b;
  return narrowed<7 - kFraction, kFraction>(v, kLargest, kLargest, 0x7f);
}

inline float of_half(uint32_t half) {
  const auto fraction = static_cast<float>(half & 0x3ffu);
  const int exponent = static_cast<int>(half >> 10 & 31);
  float magnitude = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(fraction + 1024, exponent - 25);
  if (exponent == 31) magnitude = INFINITY;
  if ((half & 0x8000u) != 0) magnitude = -magnitude;
  if (exponent != 31 || fraction == 0) return magnitude;
  constexpr uint32_t kNaN = 0x7fffffffu;
  std::memcpy(&magnitude, &kNaN, 4);
  return magnitude;
}

// The codes in the two low bytes.
inline uint32_t halves_of_e4m3(uint32_t codes) {
  uint32_t halves = 0;
  for (int i = 0; i < 2; ++i) {
    const uint32_t code = codes >> (8 * i);
    const auto fraction = static_cast<float>(code & 7);
    const int exponent = static_cast<int>(code >> 3 & 15);
    const float magnitude = exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(fraction + 8, exponent - 10);
    const float value = (code & 0x7fu) == 0x7f ? NAN : (code & 0x80u) != 0 ? -magnitude : magnitude;
    halves |= half_of(value) << (16 * i);
  }
  return halves;
}

}  // namespace emulation
