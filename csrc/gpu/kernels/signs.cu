// Codecs onebit and int2: one warp handles one block of 1024 elements at a time.
//
// A lane owns elements lane, lane + 32, ...: this is the order of the format's 32 sums, and the warp accesses 128
// contiguous bytes. The 32 signs of a lane are a word, one bit per element. A word of the message has 32 neighbouring
// signs. So the words of the message are the transpose of the lanes' words, as a matrix of bits. With int2 the same
// holds for the bits that tell which elements are large.
//
// Memory traffic per element: 4 bytes for each raw source and output, 8 for a residual, 0.129 (int2: 0.258) for a
// message. Target: 85 % of the bandwidth of a copy. Accesses of 4 bytes suffice, because each lane has 32 of them in
// flight.
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
// At most 80 registers (int2: 128): 32 elements, and 32 of the next source.
constexpr int blocks_per_multiprocessor(int magnitudes) {
  return magnitudes == 1 ? 3 : 2;
}

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

// A lane's part of a block. Bit i of bits[0]: element i is negative; of bits[1]: it is large. `means` are the block's.
template <int magnitudes>
struct Coded {
  uint32_t bits[magnitudes];
  float means[magnitudes];
};

template <int magnitudes>
BAGUA_DEVICE float decoded(const Coded<magnitudes>& coded, int i) {
  float mean = coded.means[0];
  if constexpr (magnitudes == 2) mean = (coded.bits[1] >> i & 1) != 0 ? coded.means[1] : mean;
  return float_of((coded.bits[0] << (31 - i) & ~kMagnitude) | bits_of(mean));
}

template <int magnitudes>
BAGUA_DEVICE uint32_t payload_bytes(uint32_t count) {
  return magnitudes == 1 ? (count + 7) / 8 : (count + 31) / 32 * 8;
}

// Loads the lane's words of a block's payload; bytes beyond the end count as 0.
template <bool whole, int magnitudes>
BAGUA_DEVICE void load_payload(const void* message, const Place& place, uint32_t (&words)[magnitudes]) {
  const uint8_t* payload = static_cast<const uint8_t*>(message) + place.block * (kBlock / 8 * magnitudes);
  const uint8_t* own = payload + 4 * magnitudes * place.lane;
  const uint8_t* end = payload + payload_bytes<magnitudes>(place.count);
#pragma unroll
  for (int m = 0; m < magnitudes; ++m) {
    if constexpr (whole) {
      load_words<1>(own + 4 * m, words + m);
    } else {
      words[m] = load_word_before(own + 4 * m, end);
    }
  }
}

template <bool whole, int magnitudes>
BAGUA_DEVICE void store_payload(const Work& work, const Place& place, const uint32_t (&words)[magnitudes]) {
  uint8_t* payload = work.message + place.block * (kBlock / 8 * magnitudes);
  uint8_t* own = payload + 4 * magnitudes * place.lane;
  uint8_t* end = payload + payload_bytes<magnitudes>(place.count);
#pragma unroll
  for (int m = 0; m < magnitudes; ++m) {
    if constexpr (whole) {
      store_words<1>(words + m, own + 4 * m);
    } else {
      store_word_before(words[m], own + 4 * m, end);
    }
  }
  // After the last block, zeros up to the parameters.
  if (!whole && end + place.lane < work.message + work.parameters_at) end[place.lane] = 0;
}

BAGUA_DEVICE const float* parameters(const Work& work, const void* message) {
  return reinterpret_cast<const float*>(static_cast<const uint8_t*>(message) + work.parameters_at);
}

BAGUA_DEVICE float folded(float sum) {
#pragma unroll
  for (unsigned half = 16; half > 0; half /= 2) sum = __fadd_rn(sum, __shfl_down_sync(kAllLanes, sum, half));
  return __shfl_sync(kAllLanes, sum, 0);
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
  return folded(sum);
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

BAGUA_DEVICE float shrunk(float y) {
  return __fmul_rn(fabsf(y), codec::kShrink);
}
BAGUA_DEVICE float grown_mean(float sum, uint32_t count) {
  const float mean = __fdiv_rn(sum, static_cast<float>(max(count, 1u)));
  return fminf(__fmul_rn(mean, 1 / codec::kShrink), codec::kLargest);
}

BAGUA_DEVICE void find_means(const float (&y)[kOwned], uint32_t count, Coded<1>& coded) {
  coded.means[0] = mean_of_magnitudes(y, count);
}

BAGUA_DEVICE void find_means(const float (&y)[kOwned], uint32_t count, Coded<2>& coded) {
  float all = 0;
#pragma unroll
  for (int i = 0; i < kOwned; ++i) all = __fadd_rn(all, shrunk(y[i]));
  const float mean = __fdiv_rn(folded(all), static_cast<float>(count));
  const float threshold = __fmul_rn(mean, codec::kThreshold);
  float sums[2] = {};
  coded.bits[1] = 0;
#pragma unroll
  for (int i = 0; i < kOwned; ++i) {
    const float magnitude = shrunk(y[i]);
    const bool large = magnitude > threshold;
    coded.bits[1] |= static_cast<uint32_t>(large) << i;
    sums[0] = __fadd_rn(sums[0], large ? 0.0f : magnitude);
    sums[1] = __fadd_rn(sums[1], large ? magnitude : 0.0f);
  }
  const uint32_t large = __reduce_add_sync(kAllLanes, static_cast<uint32_t>(__popc(coded.bits[1])));
  coded.means[0] = grown_mean(folded(sums[0]), count - large);
  coded.means[1] = grown_mean(folded(sums[1]), large);
  if (mean < codec::kLeastMean * codec::kShrink) coded.means[0] = coded.means[1] = 0;
  if (!finite(mean)) coded.means[0] = coded.means[1] = float_of(kQuietNaN);
}

template <bool whole, int magnitudes>
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
    Coded<magnitudes> coded[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (first + b >= work.input_count) continue;
      const void* message = work.inputs[first + b];
      load_payload<whole>(message, place, coded[b].bits);
#pragma unroll
      for (int m = 0; m < magnitudes; ++m) {
        coded[b].means[m] = __ldcs(parameters(work, message) + place.block * magnitudes + m);
      }
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (first + b >= work.input_count) continue;
#pragma unroll
      for (int m = 0; m < magnitudes; ++m) coded[b].bits[m] = transpose(coded[b].bits[m], place.lane);
      if (b == 0 && first == 0) {
#pragma unroll
        for (int i = 0; i < kOwned; ++i) y[i] = decoded(coded[b], i);
        continue;
      }
#pragma unroll
      for (int i = 0; i < kOwned; ++i) y[i] = __fadd_rn(y[i], decoded(coded[b], i));
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

template <bool whole, int magnitudes>
BAGUA_DEVICE void transcode_block(const Work& work, const Place& place) {
  float y[kOwned];
  sum_inputs<whole, magnitudes>(work, place, y);
  if (work.scaled) scale<whole>(work, place, y);
  if (work.message == nullptr) {
    for (int j = 0; j < work.decodeds; ++j) store_floats<whole>(y, place, work.decoded[j]);
    return;
  }
  Coded<magnitudes> coded;
  coded.bits[0] = 0;
#pragma unroll
  for (int i = kOwned - 1; i >= 0; --i) {
    if (!whole && 32 * static_cast<uint32_t>(i) + place.lane >= place.count) y[i] = 0;
    coded.bits[0] = __funnelshift_l(bits_of(y[i]), coded.bits[0], 1);
  }
  find_means(y, place.count, coded);
  uint32_t words[magnitudes];
#pragma unroll
  for (int m = 0; m < magnitudes; ++m) words[m] = transpose(coded.bits[m], place.lane);
  store_payload<whole>(work, place, words);
  if (place.lane == 0) {
    float* to = const_cast<float*>(parameters(work, work.message)) + place.block * magnitudes;
#pragma unroll
    for (int m = 0; m < magnitudes; ++m) to[m] = coded.means[m];
  }
#pragma unroll 1
  for (int j = 0; j < work.decodeds; ++j) {
    float v[kOwned];
#pragma unroll
    for (int i = 0; i < kOwned; ++i) v[i] = decoded(coded, i);
    store_floats<whole>(v, place, work.decoded[j]);
  }
  if (work.residual == nullptr) return;
#pragma unroll
  for (int i = 0; i < kOwned; ++i) y[i] = zero_unless_finite(__fsub_rn(y[i], decoded(coded, i)));
  store_floats<whole>(y, place, work.residual);
}

template <int magnitudes>
__global__ void __launch_bounds__(kThreads, blocks_per_multiprocessor(magnitudes))
    transcode_signs(const __grid_constant__ Work work) {
  const uint64_t whole = work.count / kBlock;
  const uint64_t step = warps_of_grid();
  for (uint64_t block = warp_of_grid(); block < whole; block += step) {
    transcode_block<true, magnitudes>(work, Place{block, kBlock, lane_of_thread()});
  }
}

// One warp handles an incomplete block. It is a separate kernel to save registers in the other one.
template <int magnitudes>
__global__ void __launch_bounds__(32) transcode_last_signs(const __grid_constant__ Work work) {
  const auto left = static_cast<uint32_t>(work.count % kBlock);
  transcode_block<false, magnitudes>(work, Place{work.count / kBlock, left, lane_of_thread()});
}

template <int magnitudes>
cudaError_t launch_magnitudes(const Work& work, On on) {
  const uint64_t whole = work.count / kBlock;
  if (whole != 0) {
    const uint64_t blocks = codec::blocks_of(whole, kThreads / 32);
    const cudaError_t error =
        launch(transcode_signs<magnitudes>, work, blocks, blocks_per_multiprocessor(magnitudes), kThreads, 0, on);
    if (error != cudaSuccess) return error;
  }
  if (work.count % kBlock == 0) return cudaSuccess;
  return launch(transcode_last_signs<magnitudes>, work, 1, 1, 32, 0, on);
}

}  // namespace

cudaError_t launch_signs(Codec codec, const Work& work, On on) {
  return codec == Codec::kSign1 ? launch_magnitudes<1>(work, on) : launch_magnitudes<2>(work, on);
}

}  // namespace bagua::cuda
