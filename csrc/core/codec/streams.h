// The part of transcode() that all codecs share, for one tile: forms y from the sources, and writes outputs and
// residual.
#pragma once

#include <algorithm>

#include "codec/codec.h"
#include "codec/simd.h"

namespace bagua::codec {

// The whole of it for kTopK, whose blocks are no tiles: top_k.cpp.
void transcode_top_k(const Transcode& work);

// Calls body(i, zero) for each whole vector of elements from 0 on, then for each element that is left. The type of
// `zero` is the type to compute in: F or float.
template <class Body>
inline void each(size_t count, const Body& body) {
  const size_t whole = count / kGroup * kGroup;
  for (size_t i = 0; i < whole; i += kGroup) {
    for (size_t q = 0; q < 4; ++q) body(i + q * kLanes, F{});
  }
  for (size_t i = whole; i < count; ++i) body(i, 0.0f);
}

inline F zero_unless_finite(F v) {
  return float_of(bits_of(v) & ((bits_of(v) & kInfinity) != kInfinity));
}
inline float zero_unless_finite(float v) {
  return (bits_of(v) & kInfinity) == kInfinity ? 0.0f : v;
}

// Handles elements [at, at + count) of one call of transcode().
struct Streams {
  const Transcode& work;
  bool past_caches;  // for outputs: use non-temporal stores

  // The sum of the raw sources: in `space`, or the only source itself; nullptr: there is none.
  const float* sum_raw(size_t at, size_t count, float* space) const {
    const float* const* raw = work.raw.data();
    const size_t raws = work.raw.size();
    if (raws < 2) return raws == 0 ? nullptr : raw[0] + at;
    each(count, [=](size_t i, auto zero) {
      using T = decltype(zero);
      T sum = load<T>(raw[0] + at + i) + load<T>(raw[1] + at + i);
      for (size_t k = 2; k < raws; ++k) sum += load<T>(raw[k] + at + i);
      store(sum, space + i);
    });
    return space;
  }

  bool scaled() const { return work.scale != 1.0f || work.residual != nullptr; }

  // to = from * scale + residual
  void scale(const float* from, size_t at, size_t count, float* to) const {
    const float scale = work.scale;
    if (work.residual == nullptr) {
      each(count, [=](size_t i, auto zero) { store(load<decltype(zero)>(from + i) * scale, to + i); });
      return;
    }
    const float* residual = (work.carried != nullptr ? work.carried : work.residual) + at;
    each(count, [=](size_t i, auto zero) {
      using T = decltype(zero);
      store(rounded(load<T>(from + i) * scale) + load<T>(residual + i), to + i);
    });
  }

  void update_residual(const float* y, const float* decoded, size_t at, size_t count) const {
    float* residual = work.residual + at;
    each(count, [=](size_t i, auto zero) {
      using T = decltype(zero);
      store(zero_unless_finite(load<T>(y + i) - load<T>(decoded + i)), residual + i);
    });
  }

  // Copies to all outputs; `from` may be one of them.
  void output(const float* from, size_t at, size_t count) const {
    for (float* const decoded : work.decoded) {
      if (decoded + at != from) copy(from, count * sizeof(float), decoded + at, past_caches);
    }
  }

  static void copy(const void* from, size_t bytes, void* to, bool past_caches) {
    if (!past_caches || reinterpret_cast<uintptr_t>(to) % kVectorBytes != 0) {
      std::memcpy(to, from, bytes);
      return;
    }
    const char* in = static_cast<const char*>(from);
    char* out = static_cast<char*>(to);
    size_t i = 0;
    for (; i + kVectorBytes <= bytes; i += kVectorBytes) {
      const I v = load<I>(in + i);
      store_vectors(&v, 1, out + i, true);
    }
    std::memcpy(out + i, in + i, bytes - i);
  }
};

}  // namespace bagua::codec
