// A group of neighbouring elements in four vector registers: loads, combines and stores them. The width of the vectors
// is that of the processor which the core is compiled for; the code uses gcc's vector types.
//
// reduce() handles one group at a time: it loads the group from all sources, combines it, and stores it to all
// destinations. From memory this is 1.3 to 1.6 times as fast as a pass per source over a block in the first-level
// cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernel/half.h"

namespace bagua {

#if defined(__AVX512F__)
constexpr size_t kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr size_t kVectorBytes = 32;
#else
constexpr size_t kVectorBytes = 16;
#endif
constexpr int kVectors = 4;
constexpr size_t kGroupBytes = kVectors * kVectorBytes;

template <class A>
using Vector __attribute__((vector_size(kVectorBytes))) = A;

// Stores `kVectors` vectors. `past_caches`: with non-temporal stores; then `to` is aligned to a vector.
template <class V>
inline void store_vectors(const V* from, int count, void* to, bool past_caches) {
  char* out = static_cast<char*>(to);
#if defined(__x86_64__)
  if (past_caches) {
    for (int q = 0; q < count; ++q) {
#if defined(__AVX512F__)
      _mm512_stream_si512(reinterpret_cast<__m512i*>(out) + q, reinterpret_cast<__m512i>(from[q]));
#elif defined(__AVX2__)
      _mm256_stream_si256(reinterpret_cast<__m256i*>(out) + q, reinterpret_cast<__m256i>(from[q]));
#else
      _mm_stream_si128(reinterpret_cast<__m128i*>(out) + q, reinterpret_cast<__m128i>(from[q]));
#endif
    }
    return;
  }
#else
  static_cast<void>(past_caches);
#endif
  for (int q = 0; q < count; ++q) std::memcpy(out + static_cast<size_t>(q) * kVectorBytes, from + q, kVectorBytes);
}

inline void store_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// Type T in memory and Acc in registers: the same type, but float for the 16-bit floating-point types.
template <class T>
struct Lanes {
  using Acc = T;
  using V = Vector<T>;
  static constexpr size_t kCount = kGroupBytes / sizeof(T);  // elements of a group
  static void load(const T* from, int q, V* v) {
    std::memcpy(v, reinterpret_cast<const char*>(from) + static_cast<size_t>(q) * kVectorBytes, kVectorBytes);
  }
  static T load_one(const T* from) { return *from; }
  static void store_one(T value, T* to) { *to = value; }
  // The group in the type of memory.
  struct Packed {
    const V* vectors;
    explicit Packed(const V* v) : vectors(v) {}
    void store(void* to, bool past_caches) const { store_vectors(vectors, kVectors, to, past_caches); }
  };
};

template <class T>
struct HalfLanes {
  using Acc = float;
  using V = Vector<float>;
  static constexpr size_t kPerVector = kVectorBytes / sizeof(float);
  static constexpr size_t kCount = kVectors * kPerVector;
  static float load_one(const T* from) {
    float value;
    to_float(from, &value, 1);
    return value;
  }
  static void store_one(float value, T* to) { from_float(&value, to, 1); }
  static void load(const T* from, int q, V* v) {
    const T* at = from + static_cast<size_t>(q) * kPerVector;
    if constexpr (std::is_same_v<T, BFloat16>) {
      HalfVector bits;
      std::memcpy(&bits, at, sizeof bits);
      *v = reinterpret_cast<V>(__builtin_convertvector(bits, Vector<uint32_t>) << 16);
    } else {
#if defined(__AVX512F__)
      *v = reinterpret_cast<V>(_mm512_maskz_cvtph_ps(kAll, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at))));
#else
      float values[kPerVector];
      to_float(at, values, kPerVector);
      std::memcpy(v, values, kVectorBytes);
#endif
    }
  }
  struct Packed {
    Vector<uint16_t> vectors[kVectors / 2];
    explicit Packed(const V* v) {
      T bits[kCount];
      for (int q = 0; q < kVectors; ++q) pack(v + q, bits + static_cast<size_t>(q) * kPerVector);
      std::memcpy(vectors, bits, sizeof vectors);
    }
    void store(void* to, bool past_caches) const { store_vectors(vectors, kVectors / 2, to, past_caches); }
  };
  static void pack(const V* v, T* to) {
    if constexpr (std::is_same_v<T, BFloat16>) {
      // In integers for the reason given at from_float().
      const auto bits = reinterpret_cast<Vector<uint32_t>>(*v);
      const auto rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
      const auto quiet = bits >> 16 | 0x40;
      const Vector<uint32_t> chosen = *v == *v ? rounded : quiet;
      const auto narrow = __builtin_convertvector(chosen, HalfVector);
      std::memcpy(to, &narrow, sizeof narrow);
    } else {
#if defined(__AVX512F__)
      const __m256i bits =
          _mm512_maskz_cvtps_ph(kAll, reinterpret_cast<__m512>(*v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bits);
#else
      float values[kPerVector];
      std::memcpy(values, v, kVectorBytes);
      from_float(values, to, kPerVector);
#endif
    }
  }

 private:
  using HalfVector __attribute__((vector_size(kVectorBytes / 2))) = uint16_t;
#if defined(__AVX512F__)
  static constexpr __mmask16 kAll = 0xffff;  // gcc 12 warns of uninitialised values in unmasked intrinsics
#endif
};

template <>
struct Lanes<Half> : HalfLanes<Half> {};
template <>
struct Lanes<BFloat16> : HalfLanes<BFloat16> {};

}  // namespace bagua
