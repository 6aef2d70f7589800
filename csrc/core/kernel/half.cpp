#include "kernel/half.h"

#include <cstring>

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace bagua {
namespace {

uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace

float half_to_float(uint16_t half) {
  const uint32_t sign = uint32_t{half & 0x8000u} << 16;
  const uint32_t exponent = half >> 10 & 0x1f;
  const uint32_t fraction = half & 0x3ff;
  if (exponent == 31) return float_of(sign | 0x7f800000 | fraction << 13 | (fraction != 0 ? 0x400000u : 0u));
  if (exponent != 0) return float_of(sign | (exponent + 112) << 23 | fraction << 13);
  return float_of(sign | bits_of(static_cast<float>(fraction) * 0x1p-24f));  // zero and subnormal: exact
}

uint16_t float_to_half(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t sign = bits >> 16 & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  uint32_t result;
  if (magnitude > 0x7f800000) {
    result = 0x7e00 | (magnitude >> 13 & 0x3ff);
  } else if (magnitude >= 0x477ff000) {  // rounds to 65536 or more
    result = 0x7c00;
  } else if (magnitude >= 0x38800000) {  // normal
    result = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
  } else {
    // Subnormal: adding 0.5 puts the last bit of the result at the last bit of the float, and the addition rounds.
    result = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000;
  }
  return static_cast<uint16_t>(sign | result);
}

void to_float(const Half* in, float* out, size_t n) {
  size_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= n; i += 8) {
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i))));
  }
#endif
  for (; i < n; ++i) out[i] = half_to_float(in[i].bits);
}

void from_float(const float* in, Half* out, size_t n) {
  size_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= n; i += 8) {
    const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), half);
  }
#endif
  for (; i < n; ++i) out[i].bits = float_to_half(in[i]);
}

void to_float(const BFloat16* in, float* out, size_t n) {
  for (size_t i = 0; i < n; ++i) out[i] = float_of(uint32_t{in[i].bits} << 16);
}

// Uses integer arithmetic: vcvtneps2bf16 flushes subnormals to zero, and hosts with and without it must agree.
void from_float(const float* in, BFloat16* out, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const uint32_t bits = bits_of(in[i]);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const uint32_t quiet = bits >> 16 | 0x40;
    out[i].bits = static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
  }
}

}  // namespace bagua
