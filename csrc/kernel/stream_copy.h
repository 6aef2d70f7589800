// Copy out of a cache block with non-temporal stores: the destination is not read first and does not push others out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace bagua {

#if defined(__x86_64__)

// Whole, aligned cache lines go past the caches; head and tail are stored plainly. Call stream_fence() before other
// threads are told that the data is there.
inline void stream_copy(void* to, const void* from, size_t n) {
  auto* out = static_cast<char*>(to);
  const auto* in = static_cast<const char*>(from);
  const size_t head = (64 - reinterpret_cast<uintptr_t>(out) % 64) % 64;
  if (head != 0) {
    const size_t take = head < n ? head : n;
    std::memcpy(out, in, take);
    out += take;
    in += take;
    n -= take;
  }
  for (; n >= 64; out += 64, in += 64, n -= 64) {
#if defined(__AVX512F__)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(out), _mm512_loadu_si512(in));
#else
    for (int i = 0; i < 4; ++i) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(out) + i, _mm_loadu_si128(reinterpret_cast<const __m128i*>(in) + i));
    }
#endif
  }
  if (n != 0) std::memcpy(out, in, n);
}

inline void stream_fence() {
  _mm_sfence();
}

#else

inline void stream_copy(void* to, const void* from, size_t n) {
  std::memcpy(to, from, n);
}
inline void stream_fence() {}

#endif

}  // namespace bagua
