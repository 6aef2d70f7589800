// topk: one block of threads per 16384 elements, which lie in shared memory while their largest are looked for.
//
// The threshold, the smallest magnitude that is kept, is found digit by digit (11, 10 and 10 bits of the magnitude as
// an integer) from counts of the elements that agree in all digits before. Then every thread knows which of its
// elements are kept, and sums over the block say where in the message they go: ascending, at equal magnitudes the first
// ones.
//
// Bytes of device memory per element: 4 for every raw source and output, 8 for a residual, 6 * density / 65536 for a
// message. To be reached: with a residual 85 % of what a copy moves, since three blocks of threads on a multiprocessor
// are in different phases; encoding alone is bound by instructions (some 40 per element), half of that bandwidth.
#include "codec/formats.h"
#include "cuda/device.h"
#include "cuda/launch.h"
#include "cuda/work.h"

namespace bagua::cuda {

// Dynamic, since it is more than a kernel has without asking for it.
extern __shared__ uint4 dynamic_shared[];

namespace {

constexpr uint32_t kBlock = codec::kTopKBlock;
constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kQuads = kBlock / 4 / kThreads;  // of a thread: elements 4 * (thread + kThreads * i) to + 3
constexpr int kBlocksPerMultiprocessor = 3;
constexpr int kMostBins = 2048;

struct Shared {
  float y[kBlock];
  uint32_t bins[kMostBins];
  uint32_t counts[kQuads * kWarps];  // kept elements of a warp's quads, see Selection
  uint32_t warp_sums[kWarps];
  uint32_t found[2];  // a digit, and how many are still wanted of the elements that have it
};

struct Block {
  uint64_t begin;  // first element
  uint32_t count;
  uint32_t kept;
  uint64_t kept_before;
};

// Blocks [first, end) of one call.
struct Range {
  Work work;
  uint64_t first;
  uint64_t end;
};

// Elements above the threshold are counted in the low half of a word, those equal to it in the high half: both are at
// most 16384.
constexpr uint32_t kAbove = 1;
constexpr uint32_t kEqual = 1u << 16;

BAGUA_DEVICE Shared& shared() {
  return *reinterpret_cast<Shared*>(dynamic_shared);
}

BAGUA_DEVICE uint32_t first_of_quad(int i) {
  return 4 * (threadIdx.x + static_cast<uint32_t>(kThreads * i));
}

BAGUA_DEVICE uint32_t kept_of(uint32_t count, uint32_t density) {
  return (count * density + 65535) / 65536;
}

// `wide`: all of the block is there, and everything is aligned to 16 bytes.
//
// Four elements, of which those that do not exist are 0.
template <bool wide>
BAGUA_DEVICE void load_quad(const float* vector, const Block& block, uint32_t first, float (&to)[4]) {
  const float* from = vector + block.begin + first;
  if constexpr (wide) {
    uint32_t words[4];
    load_words<4>(from, words);
#pragma unroll
    for (int c = 0; c < 4; ++c) to[c] = float_of(words[c]);
  } else {
#pragma unroll
    for (int c = 0; c < 4; ++c) to[c] = first + c < block.count ? from[c] : 0.0f;
  }
}

template <bool wide>
BAGUA_DEVICE void store_quad(const float (&v)[4], const Block& block, uint32_t first, float* vector) {
  float* to = vector + block.begin + first;
  if constexpr (wide) {
    const uint32_t words[4] = {bits_of(v[0]), bits_of(v[1]), bits_of(v[2]), bits_of(v[3])};
    store_words<4>(words, to);
  } else {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if (first + c < block.count) to[c] = v[c];
    }
  }
}

BAGUA_DEVICE void read_shared(uint32_t first, float (&to)[4]) {
  const uint4 words = *reinterpret_cast<const uint4*>(shared().y + first);
  to[0] = float_of(words.x);
  to[1] = float_of(words.y);
  to[2] = float_of(words.z);
  to[3] = float_of(words.w);
}

BAGUA_DEVICE void write_shared(const float (&v)[4], uint32_t first) {
  *reinterpret_cast<uint4*>(shared().y + first) =
      make_uint4(bits_of(v[0]), bits_of(v[1]), bits_of(v[2]), bits_of(v[3]));
}

// Adds a block of a message to the sum. Positions come from another host and may be wrong.
BAGUA_DEVICE void add_message(const Work& work, const Block& block, const void* message) {
  const auto* bytes = static_cast<const uint8_t*>(message);
  const auto* values = reinterpret_cast<const float*>(bytes) + block.kept_before;
  const auto* positions = reinterpret_cast<const uint16_t*>(bytes + work.parameters_at) + block.kept_before;
  for (uint32_t k = threadIdx.x; k < block.kept; k += kThreads) {
    const uint32_t position = __ldcs(positions + k);
    if (position < block.count) shared().y[position] = __fadd_rn(shared().y[position], __ldcs(values + k));
  }
}

template <bool wide>
BAGUA_DEVICE void sum_raws(const Work& work, const Block& block, uint32_t first, float (&y)[4]) {
#pragma unroll
  for (int c = 0; c < 4; ++c) y[c] = 0.0f;
  for (int k = 0; k < work.raws; ++k) {
    float next[4];
    load_quad<wide>(static_cast<const float*>(work.inputs[k]), block, first, next);
#pragma unroll
    for (int c = 0; c < 4; ++c) y[c] = k == 0 ? next[c] : __fadd_rn(y[c], next[c]);
  }
}

template <bool wide>
BAGUA_DEVICE void scale(const Work& work, const Block& block, uint32_t first, float (&y)[4]) {
#pragma unroll
  for (int c = 0; c < 4; ++c) y[c] = __fmul_rn(y[c], work.scale);
  if (work.residual == nullptr) return;
  float residual[4];
  load_quad<wide>(work.residual, block, first, residual);
#pragma unroll
  for (int c = 0; c < 4; ++c) y[c] = __fadd_rn(y[c], residual[c]);
}

// y of the block to shared memory: each thread its own quads, unless messages are added, whose elements lie anywhere.
template <bool wide>
BAGUA_DEVICE void gather(const Work& work, const Block& block) {
#pragma unroll 2
  for (int i = 0; i < kQuads; ++i) {
    float y[4];
    sum_raws<wide>(work, block, first_of_quad(i), y);
    if (work.scaled && work.raws == work.input_count) scale<wide>(work, block, first_of_quad(i), y);
    write_shared(y, first_of_quad(i));
  }
  if (work.raws == work.input_count) return;
  for (int k = work.raws; k < work.input_count; ++k) {
    __syncthreads();
    add_message(work, block, work.inputs[k]);
  }
  __syncthreads();
  if (!work.scaled) return;
#pragma unroll 2
  for (int i = 0; i < kQuads; ++i) {
    float y[4];
    read_shared(first_of_quad(i), y);
    scale<wide>(work, block, first_of_quad(i), y);
    write_shared(y, first_of_quad(i));
  }
}

// Inclusive sum over the lanes up to this one.
BAGUA_DEVICE uint32_t sum_up_to_lane(uint32_t v) {
#pragma unroll
  for (unsigned delta = 1; delta < 32; delta *= 2) {
    const uint32_t below = __shfl_up_sync(kAllLanes, v, delta);
    if (lane_of_thread() >= delta) v += below;
  }
  return v;
}

// Counts the digits of all elements whose higher bits are `prefix`.
template <int kBits, int kShift>
BAGUA_DEVICE void count_digits(const Block& block, uint32_t prefix) {
  uint32_t* bins = shared().bins;
  for (uint32_t b = threadIdx.x; b < 1u << kBits; b += kThreads) bins[b] = 0;
  __syncthreads();
#pragma unroll 2
  for (int i = 0; i < kQuads; ++i) {
    float y[4];
    read_shared(first_of_quad(i), y);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const uint32_t magnitude = magnitude_of(y[c]);
      if (magnitude >> (kShift + kBits) != prefix || first_of_quad(i) + c >= block.count) continue;
      atomicAdd(&bins[magnitude >> kShift & ((1u << kBits) - 1)], 1u);
    }
  }
  __syncthreads();
}

// The largest digit that, with all larger ones, at least `wanted` elements have: to found[0], and how many of those
// elements that have it are wanted to found[1].
template <int kBits>
BAGUA_DEVICE void find_digit(uint32_t wanted) {
  constexpr int kBins = (1 << kBits) / kThreads;  // of a thread, from the largest digit down
  Shared& s = shared();
  const uint32_t top = (1u << kBits) - 1 - threadIdx.x * kBins;
  uint32_t own = 0;
#pragma unroll
  for (int b = 0; b < kBins; ++b) own += s.bins[top - b];
  const uint32_t up_to_lane = sum_up_to_lane(own);
  if (lane_of_thread() == 31) s.warp_sums[threadIdx.x / 32] = up_to_lane;
  __syncthreads();
  uint32_t before = up_to_lane - own;
  for (uint32_t w = 0; w < threadIdx.x / 32; ++w) before += s.warp_sums[w];
  if (before < wanted && wanted <= before + own) {
    uint32_t digit = top;
    while (before + s.bins[digit] < wanted) before += s.bins[digit--];
    s.found[0] = digit;
    s.found[1] = wanted - before;
  }
  __syncthreads();
}

struct Threshold {
  uint32_t magnitude;
  uint32_t ties;  // elements of just this magnitude that are kept
};

BAGUA_DEVICE Threshold find_threshold(const Block& block) {
  Shared& s = shared();
  count_digits<11, 20>(block, 0);
  find_digit<11>(block.kept);
  uint32_t prefix = s.found[0];
  count_digits<10, 10>(block, prefix);
  find_digit<10>(s.found[1]);
  prefix = prefix << 10 | s.found[0];
  count_digits<10, 0>(block, prefix);
  find_digit<10>(s.found[1]);
  return {prefix << 10 | s.found[0], s.found[1]};
}

BAGUA_DEVICE uint32_t rank_of(float y, bool exists, const Threshold& threshold) {
  const uint32_t magnitude = magnitude_of(y);
  if (!exists || magnitude < threshold.magnitude) return 0;
  return magnitude > threshold.magnitude ? kAbove : kEqual;
}

// counts[] = elements above and equal to the threshold before each warp's quads, in order of position.
BAGUA_DEVICE void count_before(const Block& block, const Threshold& threshold) {
  Shared& s = shared();
#pragma unroll 2
  for (int i = 0; i < kQuads; ++i) {
    float y[4];
    read_shared(first_of_quad(i), y);
    uint32_t own = 0;
#pragma unroll
    for (int c = 0; c < 4; ++c) own += rank_of(y[c], first_of_quad(i) + c < block.count, threshold);
    const uint32_t of_warp = __reduce_add_sync(kAllLanes, own);
    if (lane_of_thread() == 0) s.counts[i * kWarps + static_cast<int>(threadIdx.x / 32)] = of_warp;
  }
  __syncthreads();
  constexpr int kOfLane = kQuads * kWarps / 32;
  if (threadIdx.x < 32) {
    uint32_t own = 0;
    for (int c = 0; c < kOfLane; ++c) own += s.counts[threadIdx.x * kOfLane + c];
    uint32_t before = sum_up_to_lane(own) - own;
    for (int c = 0; c < kOfLane; ++c) {
      const uint32_t count = s.counts[threadIdx.x * kOfLane + c];
      s.counts[threadIdx.x * kOfLane + c] = before;
      before += count;
    }
  }
  __syncthreads();
}

// Message, residual and outputs.
template <bool wide>
BAGUA_DEVICE void write_kept(const Work& work, const Block& block, const Threshold& threshold) {
  auto* values = reinterpret_cast<float*>(work.message) + block.kept_before;
  auto* positions = reinterpret_cast<uint16_t*>(work.message + work.parameters_at) + block.kept_before;
#pragma unroll 2
  for (int i = 0; i < kQuads; ++i) {
    const uint32_t first = first_of_quad(i);
    float y[4];
    read_shared(first, y);
    uint32_t ranks[4];
    uint32_t own = 0;
#pragma unroll
    for (int c = 0; c < 4; ++c) own += ranks[c] = rank_of(y[c], first + c < block.count, threshold);
    uint32_t before = shared().counts[i * kWarps + static_cast<int>(threadIdx.x / 32)] + sum_up_to_lane(own) - own;
    float decoded[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const uint32_t equal_before = before / kEqual;
      const bool kept = ranks[c] == kAbove || (ranks[c] == kEqual && equal_before < threshold.ties);
      if (kept) {
        const uint32_t at = before % kEqual + min(equal_before, threshold.ties);
        values[at] = y[c];
        positions[at] = static_cast<uint16_t>(first + c);
      }
      before += ranks[c];
      decoded[c] = kept ? y[c] : 0.0f;
      y[c] = kept ? 0.0f : zero_unless_finite(y[c]);
    }
    for (int j = 0; j < work.decodeds; ++j) store_quad<wide>(decoded, block, first, work.decoded[j]);
    if (work.residual != nullptr) store_quad<wide>(y, block, first, work.residual);
  }
}

template <bool wide>
BAGUA_DEVICE void write_sum(const Work& work, const Block& block) {
#pragma unroll 2
  for (int i = 0; i < kQuads; ++i) {
    float y[4];
    read_shared(first_of_quad(i), y);
    for (int j = 0; j < work.decodeds; ++j) store_quad<wide>(y, block, first_of_quad(i), work.decoded[j]);
  }
}

template <bool wide>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    transcode_top_k(const __grid_constant__ Range range) {
  const Work& work = range.work;
  for (uint64_t number = range.first + blockIdx.x; number < range.end; number += gridDim.x) {
    Block block;
    block.begin = number * kBlock;
    block.count = static_cast<uint32_t>(min(work.count - block.begin, uint64_t{kBlock}));
    block.kept = kept_of(block.count, work.density);
    block.kept_before = number * kept_of(kBlock, work.density);
    gather<wide>(work, block);
    if (work.message == nullptr) {
      write_sum<wide>(work, block);
    } else {
      const Threshold threshold = find_threshold(block);
      count_before(block, threshold);
      write_kept<wide>(work, block, threshold);
    }
    __syncthreads();
  }
}

template <bool wide>
cudaError_t launch_range(const Range& range, cudaStream_t stream) {
  if (range.first == range.end) return cudaSuccess;
  const auto kernel = transcode_top_k<wide>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int{sizeof(Shared)});
  if (error != cudaSuccess) return error;
  const uint64_t blocks = range.end - range.first;
  return launch(kernel, range, blocks, kBlocksPerMultiprocessor, kThreads, sizeof(Shared), stream);
}

}  // namespace

cudaError_t launch_top_k(const Work& work, cudaStream_t stream) {
  const uint64_t blocks = codec::blocks_of(work.count, kBlock);
  const uint64_t wide = work.aligned ? work.count / kBlock : 0;
  const cudaError_t error = launch_range<true>({work, 0, wide}, stream);
  return error != cudaSuccess ? error : launch_range<false>({work, wide, blocks}, stream);
}

}  // namespace bagua::cuda
