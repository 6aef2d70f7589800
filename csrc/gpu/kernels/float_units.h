// Codecs none, fp16 and bf16: one number per element, no parameters. A lane with a NaN converts by integer arithmetic,
// which keeps the sign and upper bits of NaN.
#pragma once

#include "gpu/kernels/half.h"
#include "gpu/kernels/units.h"

namespace bagua::cuda {

struct NoBlocks {
  static constexpr int kParameters = 0;
  static BAGUA_DEVICE uint32_t element(uint32_t, uint32_t place) { return place; }
  static BAGUA_DEVICE int parameters(uint32_t) { return 0; }
};

struct Plain : NoBlocks {
  static constexpr int kWords = kOwned;
  static constexpr int kVector = 4;
  static constexpr int kBatch = 1;
  static BAGUA_DEVICE uint32_t payload_bytes(uint32_t n) { return 4 * n; }

  template <bool whole>
  static BAGUA_DEVICE void encode(const float (&y)[kOwned], uint32_t, uint32_t, Coded<Plain>& coded) {
#pragma unroll
    for (int i = 0; i < kOwned; ++i) coded.words[i] = bits_of(y[i]);
  }

  static BAGUA_DEVICE void decode(const Coded<Plain>& coded, uint32_t, float (&y)[kOwned]) {
#pragma unroll
    for (int i = 0; i < kOwned; ++i) y[i] = float_of(coded.words[i]);
  }
};

// T: Half or BFloat16.
template <class T>
struct Sixteen : NoBlocks {
  static constexpr int kWords = kOwned / 2;
  static constexpr int kVector = 2;
  static constexpr int kBatch = 1;
  static BAGUA_DEVICE uint32_t payload_bytes(uint32_t n) { return 2 * n; }

  template <bool whole>
  static BAGUA_DEVICE void encode(const float (&y)[kOwned], uint32_t, uint32_t, Coded<Sixteen>& coded) {
    if (all_finite(y)) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) coded.words[w] = T::pack_numbers(y[2 * w], y[2 * w + 1]);
    } else {
#pragma unroll
      for (int w = 0; w < kWords; ++w) coded.words[w] = __byte_perm(T::pack(y[2 * w]), T::pack(y[2 * w + 1]), 0x5410);
    }
  }

  static BAGUA_DEVICE void decode(const Coded<Sixteen>& coded, uint32_t, float (&y)[kOwned]) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) T::unpack_numbers(coded.words[w], y[2 * w], y[2 * w + 1]);
    if constexpr (!T::kUnpacksNaN) {
      if (all_finite(y)) return;
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        y[2 * w] = T::unpack(coded.words[w] & 0xffffu);
        y[2 * w + 1] = T::unpack(coded.words[w] >> 16);
      }
    }
  }
};

}  // namespace bagua::cuda
