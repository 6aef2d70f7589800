// Vector operations of the codecs beyond gcc's own operators. Results have the same bits at every vector width: sums
// have a fixed order of lanes, and a product is never fused with an addition (see rounded()).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernel/lanes.h"

namespace bagua::codec {

using F = Vector<float>;
using I = Vector<int32_t>;

constexpr size_t kLanes = kVectorBytes / sizeof(float);
constexpr size_t kGroup = 4 * kLanes;  // elements that pack_bytes() packs at once
constexpr int32_t kMagnitude = 0x7fffffff;
constexpr int32_t kInfinity = 0x7f800000;

template <class T>
inline T load(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <class T>
inline void store(const T& value, void* to) {
  std::memcpy(to, &value, sizeof value);
}

inline I bits_of(F v) {
  return reinterpret_cast<I>(v);
}
inline F float_of(I v) {
  return reinterpret_cast<F>(v);
}
inline int32_t bits_of(float v) {
  return load<int32_t>(&v);
}
inline float float_of(int32_t v) {
  return load<float>(&v);
}

// Forces a product to be rounded before an addition. Otherwise compilers fuse the two where the processor can, and
// hosts would get different bits.
template <class T>
inline T rounded(T product) {
#if defined(__AVX512F__)
  asm("" : "+v"(product));
#elif defined(__x86_64__)
  asm("" : "+x"(product));
#elif defined(__aarch64__)
  asm("" : "+w"(product));
#endif
  return product;
}

inline I lesser(I a, I b) {
#if defined(__AVX512F__)
  return reinterpret_cast<I>(
      _mm512_maskz_min_epi32(0xffff, reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__AVX2__)
  return reinterpret_cast<I>(_mm256_min_epi32(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#else
  return a < b ? a : b;
#endif
}

inline I greater(I a, I b) {
#if defined(__AVX512F__)
  return reinterpret_cast<I>(
      _mm512_maskz_max_epi32(0xffff, reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__AVX2__)
  return reinterpret_cast<I>(_mm256_max_epi32(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#else
  return a > b ? a : b;
#endif
}

inline int32_t least(I v) {
  int32_t result = v[0];
  for (size_t l = 1; l < kLanes; ++l) result = v[l] < result ? v[l] : result;
  return result;
}

inline int32_t greatest(I v) {
  int32_t result = v[0];
  for (size_t l = 1; l < kLanes; ++l) result = v[l] > result ? v[l] : result;
  return result;
}

// Bits of the largest magnitude of `count` elements; above kInfinity if one is NaN. `count` is a multiple of kGroup.
inline int32_t largest_magnitude(const float* y, size_t count) {
  I most[4] = {};
  for (size_t i = 0; i < count; i += kGroup) {
    for (size_t q = 0; q < 4; ++q) most[q] = greater(most[q], load<I>(y + i + q * kLanes) & kMagnitude);
  }
  return greatest(greater(greater(most[0], most[1]), greater(most[2], most[3])));
}

// The same without infinities and NaN.
inline int32_t largest_finite_magnitude(const float* y, size_t count) {
  I most{};
  for (size_t i = 0; i < count; i += kLanes) {
    const I magnitude = load<I>(y + i) & kMagnitude;
    most = greater(most, magnitude & (magnitude < kInfinity));
  }
  return greatest(most);
}

// Packs four vectors of values 0 to 255 into kGroup bytes.
inline void pack_bytes(const I* v, uint8_t* to) {
#if defined(__AVX512F__)
  for (int q = 0; q < 4; ++q) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to) + q,
                     _mm512_maskz_cvtepi32_epi8(0xffff, reinterpret_cast<__m512i>(v[q])));
  }
#elif defined(__AVX2__)
  const auto at = [v](int q) { return reinterpret_cast<__m256i>(v[q]); };
  const __m256i bytes = _mm256_packus_epi16(_mm256_packs_epi32(at(0), at(1)), _mm256_packs_epi32(at(2), at(3)));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // the instruction packs within 128-bit halves
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permutevar8x32_epi32(bytes, order));
#elif defined(__x86_64__)
  const auto at = [v](int q) { return reinterpret_cast<__m128i>(v[q]); };
  const __m128i bytes = _mm_packus_epi16(_mm_packs_epi32(at(0), at(1)), _mm_packs_epi32(at(2), at(3)));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
#else
  for (size_t i = 0; i < kGroup; ++i) to[i] = static_cast<uint8_t>(v[i / kLanes][i % kLanes]);
#endif
}

// Unpacks one vector that pack_bytes() has packed.
inline I unpack_bytes(const uint8_t* from) {
#if defined(__AVX512F__)
  return reinterpret_cast<I>(_mm512_maskz_cvtepu8_epi32(0xffff, load<__m128i>(from)));
#elif defined(__AVX2__)
  return reinterpret_cast<I>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
  using Bytes __attribute__((vector_size(kLanes))) = uint8_t;
  return __builtin_convertvector(load<Bytes>(from), I);
#endif
}

// Converts integers to float; exact if the integer is a float.
inline F float_from(I v) {
  return __builtin_convertvector(v, F);
}

// Bit l of the result is the sign of lane l.
inline uint32_t sign_bits(I v) {
#if defined(__AVX512F__)
  return _mm512_cmplt_epi32_mask(reinterpret_cast<__m512i>(v), _mm512_setzero_si512());
#elif defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_ps(reinterpret_cast<__m256>(v)));
#elif defined(__x86_64__)
  return static_cast<uint32_t>(_mm_movemask_ps(reinterpret_cast<__m128>(v)));
#else
  uint32_t bits = 0;
  for (size_t l = 0; l < kLanes; ++l) bits |= (static_cast<uint32_t>(v[l]) >> 31) << l;
  return bits;
#endif
}

}  // namespace bagua::codec
