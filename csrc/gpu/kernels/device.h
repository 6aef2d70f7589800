// Helpers of all kernels: bits, memory accesses, reductions over a warp.
//
// Use only functions of the tests' emulation of a device (tests/native/kernels/emulation/cuda_runtime.h), which runs
// this source on a processor. Write sums and products as __fadd_rn() and __fmul_rn(): no compiler fuses these into one
// operation, which the formats forbid.
#pragma once

#include <cuda_pipeline_primitives.h>
#include <cuda_runtime.h>

#include <cstdint>

#define BAGUA_DEVICE __device__ __forceinline__

namespace bagua::cuda {

constexpr uint32_t kAllLanes = 0xffffffffu;
constexpr uint32_t kMagnitude = 0x7fffffffu;
constexpr uint32_t kInfinity = 0x7f800000u;
constexpr uint32_t kQuietNaN = 0x7fc00000u;

BAGUA_DEVICE uint32_t bits_of(float v) {
  return __float_as_uint(v);
}
BAGUA_DEVICE float float_of(uint32_t bits) {
  return __uint_as_float(bits);
}
BAGUA_DEVICE uint32_t magnitude_of(float v) {
  return bits_of(v) & kMagnitude;
}
BAGUA_DEVICE bool finite(float v) {
  return magnitude_of(v) < kInfinity;
}
BAGUA_DEVICE float zero_unless_finite(float v) {
  return fabsf(v) < float_of(kInfinity) ? v : 0.0f;
}
// Maximum and minimum; 0x7fffffff if an operand is NaN. Of two zeros, either one.
BAGUA_DEVICE float max_or_nan(float a, float b) {
#if defined(__CUDACC__)
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
#else
  return a != a || b != b ? float_of(kMagnitude) : a > b ? a : b;
#endif
}
BAGUA_DEVICE float min_or_nan(float a, float b) {
#if defined(__CUDACC__)
  float smaller;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(smaller) : "f"(a), "f"(b));
  return smaller;
#else
  return a != a || b != b ? float_of(kMagnitude) : a < b ? a : b;
#endif
}

BAGUA_DEVICE uint32_t lane_of_thread() {
  return threadIdx.x % 32;
}
// Index of the calling warp in the grid, and the number of warps.
BAGUA_DEVICE uint64_t warp_of_grid() {
  return (static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
}
BAGUA_DEVICE uint64_t warps_of_grid() {
  return static_cast<uint64_t>(gridDim.x) * blockDim.x / 32;
}

// Sources are read only once, so they need not stay in the caches. They don't use the read-only path, because an output
// may be one of them. Outputs are written normally, so the next kernel may find them in the second-level cache.
template <int kWords>
BAGUA_DEVICE void load_words(const void* from, uint32_t* to) {
  static_assert(kWords == 1 || kWords == 2 || kWords == 4, "as wide as an access can be");
  if constexpr (kWords == 1) {
    to[0] = __ldcs(static_cast<const uint32_t*>(from));
  } else if constexpr (kWords == 2) {
    const uint2 v = __ldcs(static_cast<const uint2*>(from));
    to[0] = v.x;
    to[1] = v.y;
  } else {
    const uint4 v = __ldcs(static_cast<const uint4*>(from));
    to[0] = v.x;
    to[1] = v.y;
    to[2] = v.z;
    to[3] = v.w;
  }
}

// Stores 16 bytes by one access. The compiler sometimes splits a plain assignment into four, mostly in loops.
BAGUA_DEVICE void store_vector(uint4* to, const uint4& v) {
#if defined(__CUDACC__)
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
#else
  *to = v;
#endif
}
BAGUA_DEVICE void store_vector(uint2* to, const uint2& v) {
#if defined(__CUDACC__)
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(v.x), "r"(v.y) : "memory");
#else
  *to = v;
#endif
}

template <int kWords>
BAGUA_DEVICE void store_words(const uint32_t* from, void* to) {
  static_assert(kWords == 1 || kWords == 2 || kWords == 4, "as wide as an access can be");
  if constexpr (kWords == 1) {
    *static_cast<uint32_t*>(to) = from[0];
  } else if constexpr (kWords == 2) {
    store_vector(static_cast<uint2*>(to), make_uint2(from[0], from[1]));
  } else {
    store_vector(static_cast<uint4*>(to), make_uint4(from[0], from[1], from[2], from[3]));
  }
}

// Begins to copy 16 bytes to shared memory, on the way through no register. The calling thread finds them there after
// wait_for_copies(), others after a barrier that follows.
BAGUA_DEVICE void start_copy(const void* from, void* to) {
  __pipeline_memcpy_async(to, from, 16);
}
BAGUA_DEVICE void wait_for_copies() {
  __pipeline_commit();
  __pipeline_wait_prior(0);
}

// Loads a word; bytes at or after `end` count as 0. `from` is aligned to 4 bytes.
BAGUA_DEVICE uint32_t load_word_before(const uint8_t* from, const uint8_t* end) {
  if (from + 4 <= end) return *reinterpret_cast<const uint32_t*>(from);
  uint32_t word = 0;
  for (int b = 0; b < 3; ++b) {
    if (from + b < end) word |= static_cast<uint32_t>(from[b]) << (8 * b);
  }
  return word;
}

BAGUA_DEVICE void store_word_before(uint32_t word, uint8_t* to, const uint8_t* end) {
  if (to + 4 <= end) {
    *reinterpret_cast<uint32_t*>(to) = word;
    return;
  }
  for (int b = 0; b < 3; ++b) {
    if (to + b < end) to[b] = static_cast<uint8_t>(word >> (8 * b));
  }
}

// Packs the low bytes of four words into one.
BAGUA_DEVICE uint32_t pack_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

// 2^23 + byte `c` of the word, as a float. Subtracting 2^23 afterwards is exact, and cheaper than a conversion.
template <int c>
BAGUA_DEVICE float large_from_byte(uint32_t word) {
  return float_of(__byte_perm(word, 0x4b000000u, 0x7540u + c));
}

}  // namespace bagua::cuda
