// Conversions as the emulated device has them, beside what NVIDIA's headers say on a processor that the device's
// instructions give: a program of its own, as those headers and the emulated device's exclude each other.
#include "emulation/conversions.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstring>

#include "harness.h"

namespace bagua {
namespace {

uint32_t bits_of(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, 4);
  return bits;
}

// Floats that lie on and around everything that is rounded to: all first 20 bits, and a few of the others.
template <class Check>
void for_floats(Check check) {
  for (uint32_t first = 0; first < 1u << 20; ++first) {
    for (const uint32_t last : {0u, 1u, 0x7ffu, 0x800u, 0x801u, 0xfffu}) {
      const uint32_t bits = first << 12 | last;
      float v;
      std::memcpy(&v, &bits, 4);
      if (!check(v)) return;
    }
  }
}

// Whether both are the same, or NaN, of which a device has one.
bool same(float v, uint32_t found, uint32_t expected, uint32_t nan) {
  if (v != v) {
    EXPECT_EQ(found, nan);
    return found == nan;
  }
  EXPECT_EQ(found, expected);
  return found == expected;
}

TEST(to_half) {
  for_floats([](float v) {
    const __half_raw expected = __float2half_rn(v);
    return same(v, emulation::half_of(v), expected.x, 0x7fff);
  });
}

TEST(to_bfloat) {
  for_floats([](float v) {
    const __nv_bfloat16_raw expected = __float2bfloat16_rn(v);
    return same(v, emulation::bfloat_of(v), expected.x, 0x7fff);
  });
}

TEST(to_e4m3) {
  for_floats([](float v) {
    return same(v, emulation::fp8_of<3>(v), __nv_cvt_float_to_fp8(v, __NV_SATFINITE, __NV_E4M3), 0x7f);
  });
}

TEST(to_e5m2) {
  for_floats([](float v) {
    return same(v, emulation::fp8_of<2>(v), __nv_cvt_float_to_fp8(v, __NV_SATFINITE, __NV_E5M2), 0x7f);
  });
}

TEST(of_half) {
  for (uint32_t half = 0; half < 65536; ++half) {
    __half_raw raw;
    raw.x = static_cast<unsigned short>(half);
    const float expected = __half2float(raw);
    const float found = emulation::of_half(half);
    if (!same(expected, bits_of(found), bits_of(expected), 0x7fffffff)) return;
  }
}

TEST(of_e4m3) {
  for (uint32_t codes = 0; codes < 65536; ++codes) {
    for (uint32_t i = 0; i < 2; ++i) {
      const auto code = static_cast<__nv_fp8_storage_t>(codes >> (8 * i));
      const __half_raw expected = __nv_cvt_fp8_to_halfraw(code, __NV_E4M3);
      const bool nan = (code & 0x7f) == 0x7f;
      const uint32_t found = emulation::halves_of_e4m3(codes) >> (16 * i) & 0xffffu;
      EXPECT_EQ(found, nan ? 0x7fffu : expected.x);
      if (found != (nan ? 0x7fffu : expected.x)) return;
    }
  }
}

// A code of e5m2 is the first half of a half.
TEST(of_e5m2) {
  for (uint32_t code = 0; code < 256; ++code) {
    const __half_raw expected = __nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(code), __NV_E5M2);
    if ((code & 0x7f) > 0x7c) continue;  // NaN
    EXPECT_EQ(code << 8, expected.x);
  }
}

}  // namespace
}  // namespace bagua
