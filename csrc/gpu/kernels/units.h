// The work of one warp on a unit of 512 elements, for codecs with blocks of 512 or 128 elements or without blocks.
//
// A lane owns 16 places of the unit, four groups of four neighbours: 128 * q + 4 * lane + c, for q and c from 0 to 3.
// So a warp accesses 512 contiguous bytes of floats, 16 per lane, and four one-byte codes of a lane are a word. y[4 * q
// + c] is the element at that place. A codec C defines
//   kWords, kVector      words of the payload that a lane owns; how many of them lie side by side
//   kParameters          floats of parameters per unit
//   kBatch               messages whose payloads are loaded before the first of them is decoded
//   payload_bytes(n)     of n elements of a unit; parameters(n) of them
//   element(n, place)    of an incomplete unit: which element is at the place; n or more: none
//   encode<whole>(y, n, coded), decode(coded, y)    called by the whole warp; places without an element are 0
#pragma once

#include "gpu/kernels/device.h"
#include "gpu/kernels/work.h"

namespace bagua::cuda {

constexpr uint32_t kUnit = 512;
constexpr int kQuads = 4;
constexpr int kOwned = 4 * kQuads;

// The unit and lane that a thread works on.
struct Unit {
  uint64_t number;
  uint32_t count;  // elements, at most kUnit
  uint32_t lane;

  BAGUA_DEVICE uint64_t begin() const { return number * kUnit; }
};

// A lane's share of the unit's part of a message. All lanes have all parameters.
template <class C>
struct Coded {
  uint32_t words[C::kWords];
  float parameters[C::kParameters == 0 ? 1 : C::kParameters];
};

// The element at place `i` of the lane; unit.count or more: none.
template <class C>
BAGUA_DEVICE uint32_t element_of(const Unit& unit, int i) {
  return C::element(unit.count, 128 * static_cast<uint32_t>(i / 4) + 4 * unit.lane + static_cast<uint32_t>(i % 4));
}

// True if all of the lane's elements are finite. It multiplies, because GPUs have twice as many units for products as
// for comparisons.
BAGUA_DEVICE bool all_finite(const float (&y)[kOwned]) {
  float zero = 0;
#pragma unroll
  for (int i = 0; i < kOwned; ++i) zero = __fmaf_rn(y[i], 0.0f, zero);
  return zero == 0;
}

// Bits of the largest magnitude among n elements of each lane of the warp; those of a NaN if there is one.
template <int n>
BAGUA_DEVICE uint32_t largest_magnitude(const float* y) {
  float most = fabsf(y[0]);
#pragma unroll
  for (int i = 1; i < n; ++i) most = max_or_nan(most, fabsf(y[i]));
  return __reduce_max_sync(kAllLanes, bits_of(most));
}

// How a unit can be accessed. kWide: it is complete, and all pointers are aligned to 16 bytes. kSingle: it is complete.
// kPartial: it is incomplete.
enum class Access { kWide, kSingle, kPartial };

template <class C, Access access>
BAGUA_DEVICE void load_floats(const float* vector, const Unit& unit, float (&to)[kOwned]) {
  const float* from = vector + unit.begin();
  if constexpr (access == Access::kWide) {
    uint32_t words[kOwned];
#pragma unroll
    for (int q = 0; q < kQuads; ++q) load_words<4>(from + 128 * q + 4 * unit.lane, words + 4 * q);
#pragma unroll
    for (int i = 0; i < kOwned; ++i) to[i] = float_of(words[i]);
  } else if constexpr (access == Access::kSingle) {
#pragma unroll
    for (int i = 0; i < kOwned; ++i) to[i] = from[128 * (i / 4) + 4 * unit.lane + i % 4];
  } else {
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
      const uint32_t element = element_of<C>(unit, i);
      to[i] = element < unit.count ? from[element] : 0.0f;
    }
  }
}

template <class C, Access access>
BAGUA_DEVICE void store_floats(const float (&v)[kOwned], const Unit& unit, float* vector) {
  float* to = vector + unit.begin();
  if constexpr (access == Access::kWide) {
    uint32_t words[kOwned];
#pragma unroll
    for (int i = 0; i < kOwned; ++i) words[i] = bits_of(v[i]);
#pragma unroll
    for (int q = 0; q < kQuads; ++q) store_words<4>(words + 4 * q, to + 128 * q + 4 * unit.lane);
  } else if constexpr (access == Access::kSingle) {
#pragma unroll
    for (int i = 0; i < kOwned; ++i) to[128 * (i / 4) + 4 * unit.lane + i % 4] = v[i];
  } else {
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
      const uint32_t element = element_of<C>(unit, i);
      if (element < unit.count) to[element] = v[i];
    }
  }
}

// Offset in the unit's payload of the lane's words that `access` number kVector * access begins with.
template <class C>
BAGUA_DEVICE uint32_t payload_offset(const Unit& unit, int access) {
  return (unit.lane + 32 * static_cast<uint32_t>(access)) * C::kVector * 4;
}

template <class C, Access access>
BAGUA_DEVICE void load_coded(const Work& work, const void* message, const Unit& unit, Coded<C>& coded) {
  const auto* bytes = static_cast<const uint8_t*>(message);
  const uint8_t* payload = bytes + unit.number * C::payload_bytes(kUnit);
#pragma unroll
  for (int a = 0; a < C::kWords / C::kVector; ++a) {
    const uint8_t* from = payload + payload_offset<C>(unit, a);
    if constexpr (access == Access::kWide) {
      load_words<C::kVector>(from, coded.words + a * C::kVector);
    } else {
      const uint8_t* end = payload + C::payload_bytes(unit.count);
#pragma unroll
      for (int w = 0; w < C::kVector; ++w) {
        uint32_t& word = coded.words[a * C::kVector + w];
        if constexpr (access == Access::kSingle) {
          load_words<1>(from + 4 * w, &word);
        } else {
          word = load_word_before(from + 4 * w, end);
        }
      }
    }
  }
  if constexpr (C::kParameters != 0) {
    const auto* parameters = reinterpret_cast<const float*>(bytes + work.parameters_at) + unit.number * C::kParameters;
#pragma unroll
    for (int p = 0; p < C::kParameters; ++p) {
      coded.parameters[p] = access != Access::kPartial || p < C::parameters(unit.count) ? parameters[p] : 0.0f;
    }
  }
}

template <class C, Access access>
BAGUA_DEVICE void store_coded(const Work& work, const Unit& unit, const Coded<C>& coded) {
  uint8_t* payload = work.message + unit.number * C::payload_bytes(kUnit);
  const uint8_t* end = payload + C::payload_bytes(unit.count);
#pragma unroll
  for (int a = 0; a < C::kWords / C::kVector; ++a) {
    uint8_t* to = payload + payload_offset<C>(unit, a);
    if constexpr (access == Access::kWide) {
      store_words<C::kVector>(coded.words + a * C::kVector, to);
    } else {
#pragma unroll
      for (int w = 0; w < C::kVector; ++w) {
        const uint32_t word = coded.words[a * C::kVector + w];
        if constexpr (access == Access::kSingle) {
          store_words<1>(&word, to + 4 * w);
        } else {
          store_word_before(word, to + 4 * w, end);
        }
      }
    }
  }
  if constexpr (C::kParameters != 0) {
    auto* parameters = reinterpret_cast<float*>(work.message + work.parameters_at) + unit.number * C::kParameters;
    const int existing = access == Access::kPartial ? C::parameters(unit.count) : C::kParameters;
#pragma unroll
    for (int p = 0; p < C::kParameters; ++p) {
      if (unit.lane == static_cast<uint32_t>(p) && p < existing) parameters[p] = coded.parameters[p];
    }
    if constexpr (access == Access::kPartial) {  // after the last unit, zeros up to the parameters
      const uint8_t* gap_end = work.message + work.parameters_at;
      const bool last = unit.begin() + unit.count == work.count;
      if (last && end + unit.lane < gap_end) payload[C::payload_bytes(unit.count) + unit.lane] = 0;
    }
  }
}

// y = sum of raw + sum of encoded, in this order; 0 without sources. The first source is copied, not added to 0, which
// would change -0 and NaN.
template <class C, Access access>
BAGUA_DEVICE void sum_inputs(const Work& work, const Unit& unit, float (&y)[kOwned]) {
  float next[kOwned];
  if (work.raws > 0) {
    load_floats<C, access>(static_cast<const float*>(work.inputs[0]), unit, y);
  } else {
#pragma unroll
    for (int i = 0; i < kOwned; ++i) y[i] = 0.0f;
  }
#pragma unroll 1  // unrolling would need too many registers
  for (int k = 1; k < work.raws; ++k) {
    load_floats<C, access>(static_cast<const float*>(work.inputs[k]), unit, next);
#pragma unroll
    for (int i = 0; i < kOwned; ++i) y[i] = __fadd_rn(y[i], next[i]);
  }
#pragma unroll 1
  for (int first = work.raws; first < work.input_count; first += C::kBatch) {
    Coded<C> coded[C::kBatch];
#pragma unroll
    for (int b = 0; b < C::kBatch; ++b) {
      if (first + b < work.input_count) load_coded<C, access>(work, work.inputs[first + b], unit, coded[b]);
    }
#pragma unroll
    for (int b = 0; b < C::kBatch; ++b) {
      if (first + b >= work.input_count) break;
      if (b == 0 && first == 0) {
        C::decode(coded[b], unit.lane, y);
        continue;
      }
      C::decode(coded[b], unit.lane, next);
#pragma unroll
      for (int i = 0; i < kOwned; ++i) y[i] = __fadd_rn(y[i], next[i]);
    }
  }
}

// y * scale [+ residual]
template <class C, Access access>
BAGUA_DEVICE void scale(const Work& work, const Unit& unit, float (&y)[kOwned]) {
#pragma unroll
  for (int i = 0; i < kOwned; ++i) y[i] = __fmul_rn(y[i], work.scale);
  if (work.residual == nullptr) return;
  float residual[kOwned];
  load_floats<C, access>(work.residual, unit, residual);
#pragma unroll
  for (int i = 0; i < kOwned; ++i) y[i] = __fadd_rn(y[i], residual[i]);
}

template <class C, Access access>
BAGUA_DEVICE void output(const Work& work, const Unit& unit, const float (&v)[kOwned]) {
#pragma unroll 1
  for (int j = 0; j < work.decodeds; ++j) store_floats<C, access>(v, unit, work.decoded[j]);
}

template <class C, Access access>
BAGUA_DEVICE void transcode_unit(const Work& work, const Unit& unit) {
  float y[kOwned];
  sum_inputs<C, access>(work, unit, y);
  if (work.scaled) scale<C, access>(work, unit, y);
  if (work.message == nullptr) {
    output<C, access>(work, unit, y);
    return;
  }
  if constexpr (access == Access::kPartial) {  // places without an element may have the values of bytes beyond the end
#pragma unroll
    for (int i = 0; i < kOwned; ++i) y[i] = element_of<C>(unit, i) < unit.count ? y[i] : 0.0f;
  }
  Coded<C> coded;
  C::template encode<access != Access::kPartial>(y, unit.count, unit.lane, coded);
  store_coded<C, access>(work, unit, coded);
  if (work.residual == nullptr && work.decodeds == 0) return;
  float decoded[kOwned];
  C::decode(coded, unit.lane, decoded);
  output<C, access>(work, unit, decoded);
  if (work.residual == nullptr) return;
#pragma unroll
  for (int i = 0; i < kOwned; ++i) y[i] = zero_unless_finite(__fsub_rn(y[i], decoded[i]));
  store_floats<C, access>(y, unit, work.residual);
}

}  // namespace bagua::cuda
