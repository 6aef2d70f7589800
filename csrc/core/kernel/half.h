// Converts arrays between float and the 16-bit floating-point types: rounds to nearest even, NaN becomes a quiet NaN,
// same bits on every processor. Arrays are aligned to their elements only.
#pragma once

#include <cstddef>
#include <cstdint>

namespace bagua {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

void to_float(const Half* in, float* out, size_t n);
void to_float(const BFloat16* in, float* out, size_t n);
void from_float(const float* in, Half* out, size_t n);
void from_float(const float* in, BFloat16* out, size_t n);

// Single values, portable.
float half_to_float(uint16_t half);
uint16_t float_to_half(float value);

}  // namespace bagua
