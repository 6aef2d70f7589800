// Codec onebit: one warp handles one block of 1024 elements at a time.
//
// A lane owns elements lane, lane + 32, ...: this is the order of the format's 32 sums, and the warp accesses 128
// contiguous bytes. The 32 signs of a lane are a word, one bit per element. A word of the message has 32 neighbouring
// signs. So the words of the message are the transpose of the lanes' words, as a matrix of bits.
//
// Memory traffic per element: 4 bytes for each raw source and output, 8 for a residual, 0.129 for a message. Target:
// 85 % of the bandwidth of a copy. Accesses of 4 bytes suffice, because each lane has 32 of them in flight.
#include "codec/formats.h"
#include "gpu/kernels/device.h"
#include "gpu/kernels/launch.h"
#include "gpu/kernels/work.h"

namespace bagua::cuda {
namespace {

constexpr uint32_t kBlock = 1024;
constexpr int kOwned = 32;
constexpr int kBatch = 2;  // messages that are loaded before the first one is decoded
constexpr int kThreads = 256;
constexpr int kBlocksPerMultiprocessor = 3;  // at most 80 registers: 32 elements, and 32 of the next source

// The block that a warp works on.
struct Place {
  uint64_t block;
  uint32_t count;  // elements
  uint32_t lane;
};

// Transposes: bit b of lane a becomes bit a of lane b. It is its own inverse.
BAGUA_DEVICE uint32_t transpose(uint32_t row, uint32_t lane) {
  uint32_t low = 0x0000ffffu;
#pragma unroll
  for (uint32_t half = 16; half > 0; half /= 2) {
    const uint32_t other = __shfl_xor_sync(kAllLanes, row, static_cast<int>(half));
    row = (lane & half) != 0 ? (row & ~low) | (other >> half & low) : (row & low) | (other & low) << half;
    low ^= low << half / 2;
  }
  return row;
}

template <bool whole>
BAGUA_DEVICE void load_floats(const float* vector, const Place& place, float (&to)[kOwned]) {
  const float* from = vector + place.block * kBlock + place.lane;
#pragma unroll
  for (int i = 0; i < kOwned; ++i) {
    const bool exists = whole || 32 * static_cast<uint32_t>(i) + place.lane < place.count;
    to[i] = exists ? __ldcs(from + 32 * i) : 0.0f;
  }
}

template <bool whole>
BAGUA_DEVICE void store_floats(const float (&v)[kOwned], const Place& place, float* vector) {
  float* to = vector + place.block * kBlock + place.lane;
#pragma unroll
  for (int i = 0; i < kOwned; ++i) {
    if (whole || 32 * static_cast<uint32_t>(i) + place.lane < place.count) to[32 * i] = v[i];
  }
}

// `signs`: bit i is the sign of the lane's element i.
BAGUA_DEVICE float decoded(uint32_t signs, float mean, int i) {
  return float_of((signs << (31 - i) & ~kMagnitude) | bits_of(mean));
}

// Loads the lane's word of a block's payload; bytes beyond the end count as 0.
template <bool whole>
BAGUA_DEVICE uint32_t load_signs(const void* message, const Place& place) {
  const uint8_t* payload = static_cast<const uint8_t*>(message) + place.block * (kBlock / 8);
  uint32_t word;
  if constexpr (whole) {
    load_words<1>(payload + 4 * place.lane, &word);
  } else {
    word = load_word_before(payload + 4 * place.lane, payload + (place.count + 7) / 8);
  }
  return word;
}

template <bool whole>
BAGUA_DEVICE void store_signs(const Work& work, const Place& place, uint32_t word) {
  uint8_t* payload = work.message + place.block * (kBlock / 8);
  if constexpr (whole) {
    store_words<1>(&word, payload + 4 * place.lane);
  } else {
    uint8_t* end = payload + (place.count + 7) / 8;
    store_word_before(word, payload + 4 * place.lane, end);
    // After the last block, zeros up to the parameters.
    if (end + place.lane < work.message + work.parameters_at) end[place.lane] = 0;
  }
}

BAGUA_DEVICE const float* parameters(const Work& work, const void* message) {
  return reinterpret_cast<const float*>(static_cast<const uint8_t*>(message) + work.parameters_at);
}

// The sum in the order of the format: each lane adds its own elements, then halves are folded. `smaller`: of magnitudes
// that are multiplied by 1 / kBlock.
template <bool smaller>
BAGUA_DEVICE float sum_of_magnitudes(const float (&y)[kOwned]) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kOwned; ++i) {
    sum = __fadd_rn(sum, smaller ? __fmul_rn(fabsf(y[i]), 1.0f / kBlock) : fabsf(y[i]));
  }
#pragma unroll
  for (unsigned half = 16; half > 0; half /= 2) sum = __fadd_rn(sum, __shfl_down_sync(kAllLanes, sum, half));
  return __shfl_sync(kAllLanes, sum, 0);
}

BAGUA_DEVICE float mean_of_magnitudes(const float (&y)[kOwned], uint32_t count) {
  const float n = static_cast<float>(count);
  const float mean = __fdiv_rn(sum_of_magnitudes<false>(y), n);
  if (finite(mean)) return mean;
  uint32_t own = 0;
#pragma unroll
  for (int i = 0; i < kOwned; ++i) own = max(own, magnitude_of(y[i]));
  const uint32_t most = __reduce_max_sync(kAllLanes, own);
  if (most >= kInfinity) return float_of(kQuietNaN);
  const float smaller = __fmul_rn(__fdiv_rn(sum_of_magnitudes<true>(y), n), static_cast<float>(kBlock));
  return smaller < float_of(most) ? smaller : float_of(most);
}

template <bool whole>
BAGUA_DEVICE void sum_inputs(const Work& work, const Place& place, float (&y)[kOwned]) {
  if (work.raws > 0) {
    load_floats<whole>(static_cast<const float*>(work.inputs[0]), place, y);
  } else {
#pragma unroll
    for (int i = 0; i < kOwned; ++i) y[i] = 0.0f;
  }
#pragma unroll 1  // unrolling would need too many registers
  for (int k = 1; k < work.raws; ++k) {
    float next[kOwned];
    load_floats<whole>(static_cast<const float*>(work.inputs[k]), place, next);
#pragma unroll
    for (int i = 0; i < kOwned; ++i) y[i] = __fadd_rn(y[i], next[i]);
  }
#pragma unroll 1
  for (int first = work.raws; first < work.input_count; first += kBatch) {
    uint32_t words[kBatch];
    float means[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (first + b >= work.input_count) continue;
      const void* message = work.inputs[first + b];
      words[b] = load_signs<whole>(message, place);
      means[b] = __ldcs(parameters(work, message) + place.block);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (first + b >= work.input_count) continue;
      const uint32_t signs = transpose(words[b], place.lane);
      if (b == 0 && first == 0) {
#pragma unroll
        for (int i = 0; i < kOwned; ++i) y[i] = decoded(signs, means[b], i);
        continue;
      }
#pragma unroll
      for (int i = 0; i < kOwned; ++i) y[i] = __fadd_rn(y[i], decoded(signs, means[b], i));
    }
  }
}

template <bool whole>
BAGUA_DEVICE void scale(const Work& work, const Place& place, float (&y)[kOwned]) {
#pragma unroll
  for (int i = 0; i < kOwned; ++i) y[i] = __fmul_rn(y[i], work.scale);
  if (work.residual == nullptr) return;
  float residual[kOwned];
  load_floats<whole>(work.residual, place, residual);
#pragma unroll
  for (int i = 0; i < kOwned; ++i) y[i] = __fadd_rn(y[i], residual[i]);
}

template <bool whole>
BAGUA_DEVICE void transcode_block(const Work& work, const Place& place) {
  float y[kOwned];
  sum_inputs<whole>(work, place, y);
  if (work.scaled) scale<whole>(work, place, y);
  if (work.message == nullptr) {
    for (int j = 0; j < work.decodeds; ++j) store_floats<whole>(y, place, work.decoded[j]);
    return;
  }
  uint32_t signs = 0;
#pragma unroll
  for (int i = kOwned - 1; i >= 0; --i) {
    if (!whole && 32 * static_cast<uint32_t>(i) + place.lane >= place.count) y[i] = 0;
    signs = __funnelshift_l(bits_of(y[i]), signs, 1);
  }
  const float mean = mean_of_magnitudes(y, place.count);
  store_signs<whole>(work, place, transpose(signs, place.lane));
  if (place.lane == 0) const_cast<float*>(parameters(work, work.message))[place.block] = mean;
#pragma unroll 1
  for (int j = 0; j < work.decodeds; ++j) {
    float v[kOwned];
#pragma unroll
    for (int i = 0; i < kOwned; ++i) v[i] = decoded(signs, mean, i);
    store_floats<whole>(v, place, work.decoded[j]);
  }
  if (work.residual == nullptr) return;
#pragma unroll
  for (int i = 0; i < kOwned; ++i) y[i] = zero_unless_finite(__fsub_rn(y[i], decoded(signs, mean, i)));
  store_floats<whole>(y, place, work.residual);
}

__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    transcode_signs(const __grid_constant__ Work work) {
  const uint64_t whole = work.count / kBlock;
  const uint64_t step = warps_of_grid();
  for (uint64_t block = warp_of_grid(); block < whole; block += step) {
    transcode_block<true>(work, Place{block, kBlock, lane_of_thread()});
  }
}

// One warp handles an incomplete block. It is a separate kernel to save registers in the other one.
__global__ void __launch_bounds__(32) transcode_last_signs(const __grid_constant__ Work work) {
  const auto left = static_cast<uint32_t>(work.count % kBlock);
  transcode_block<false>(work, Place{work.count / kBlock, left, lane_of_thread()});
}

}  // namespace

cudaError_t launch_signs(const Work& work, On on) {
  const uint64_t whole = work.count / kBlock;
  if (whole != 0) {
    const uint64_t blocks = codec::blocks_of(whole, kThreads / 32);
    const cudaError_t error = launch(transcode_signs, work, blocks, kBlocksPerMultiprocessor, kThreads, 0, on);
    if (error != cudaSuccess) return error;
  }
  if (work.count % kBlock == 0) return cudaSuccess;
  return launch(transcode_last_signs, work, 1, 1, 32, 0, on);
}

}  // namespace bagua::cuda
