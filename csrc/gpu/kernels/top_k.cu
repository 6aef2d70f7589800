// Codec topk: one thread block handles 16384 elements, which stay in shared memory during the search (top_k_select.h).
//
// Threads load and store four neighbours each, at 4 * (thread + 512 * i). During the search each thread has 32
// contiguous elements. The layout in shared memory avoids bank conflicts in both cases.
//
// Memory traffic per element: 4 bytes for each raw source and output, 8 for a residual, 6 * density / 65536 for a
// message. Target, if few elements are kept: 85 % of the bandwidth of a copy. Two or three thread blocks of a
// multiprocessor are in different phases, and an element takes some 20 instructions.
#include <atomic>
#include <iterator>

#include "codec/formats.h"
#include "gpu/kernels/launch.h"
#include "gpu/kernels/top_k_select.h"
#include "gpu/kernels/work.h"

namespace bagua::cuda {
namespace {

using namespace top_k;

constexpr int kQuads = kBlock / 4 / kThreads;  // per thread: elements 4 * (thread + kThreads * i) to + 3
constexpr int kBatch = 2;                      // quads of a further source whose loads are in flight at once
constexpr int kMessages = 2;                   // messages whose first elements are loaded before one is added
constexpr int kBlocksPerMultiprocessor = 3;    // limit by registers; shared memory may allow fewer
static_assert(kQuads % kBatch == 0, "no quad is left over");

constexpr uint32_t kNowhere = kAllLanes;  // not a position in a block

// Blocks [first, end) of a call.
struct Range {
  Work work;
  uint64_t first;
  uint64_t end;
};

BAGUA_DEVICE uint32_t first_of_quad(int i) {
  return 4 * threadIdx.x + static_cast<uint32_t>(4 * kThreads * i);
}

// Place of the first element of quad `i`: quads are a multiple of 256 apart, which place_of() does not permute.
BAGUA_DEVICE uint32_t place_of_quad(int i) {
  return place_of(4 * threadIdx.x) + static_cast<uint32_t>(4 * kThreads * i);
}

BAGUA_DEVICE uint32_t kept_of(uint32_t count, uint32_t density) {
  return (count * density + 65535) / 65536;
}

// `wide`: the block is complete, and all pointers are aligned to 16 bytes.
//
// Loads quad `i`; elements beyond the end are 0.
template <bool wide>
BAGUA_DEVICE void load_quad(const float* vector, const Block& block, int i, float (&to)[4]) {
  const float* from = vector + (block.begin + 4 * threadIdx.x) + 4 * kThreads * i;
  if constexpr (wide) {
    uint32_t words[4];
    load_words<4>(from, words);
#pragma unroll
    for (int c = 0; c < 4; ++c) to[c] = float_of(words[c]);
  } else {
#pragma unroll
    for (int c = 0; c < 4; ++c) to[c] = first_of_quad(i) + c < block.count ? from[c] : 0.0f;
  }
}

template <bool wide>
BAGUA_DEVICE void store_quad(const float (&v)[4], const Block& block, int i, float* vector) {
  float* to = vector + (block.begin + 4 * threadIdx.x) + 4 * kThreads * i;
  if constexpr (wide) {
    const uint32_t words[4] = {bits_of(v[0]), bits_of(v[1]), bits_of(v[2]), bits_of(v[3])};
    store_words<4>(words, to);
  } else {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if (first_of_quad(i) + c < block.count) to[c] = v[c];
    }
  }
}

// Begins to put the first source, or zeros, into shared memory. Each thread puts its own quads there; they are complete
// for it after wait_for_copies(). All quads are in flight at once, which registers have no room for.
template <bool wide>
BAGUA_DEVICE void copy_first(const Work& work, const Block& block) {
  const auto* const first = static_cast<const float*>(work.inputs[0]);
  if (work.raws == 0) {
    constexpr float kZeros[4] = {};
#pragma unroll
    for (int i = 0; i < kQuads; ++i) write_shared(kZeros, place_of_quad(i));
  } else if constexpr (wide) {
    const float* from = first + (block.begin + 4 * threadIdx.x);
#pragma unroll
    for (int i = 0; i < kQuads; ++i) start_copy(from + 4 * kThreads * i, shared().y + place_of_quad(i));
  } else {
#pragma unroll 1
    for (int i = 0; i < kQuads; ++i) {
      float y[4];
      load_quad<wide>(first, block, i, y);
      write_shared(y, place_of_quad(i));
    }
  }
}

BAGUA_DEVICE void read_quads(int i, float (&y)[kBatch][4]) {
#pragma unroll
  for (int b = 0; b < kBatch; ++b) read_shared(place_of_quad(i + b), y[b]);
}

BAGUA_DEVICE void write_quads(const float (&y)[kBatch][4], int i) {
#pragma unroll
  for (int b = 0; b < kBatch; ++b) write_shared(y[b], place_of_quad(i + b));
}

// Adds kBatch quads of a vector from quad `i` on.
template <bool wide>
BAGUA_DEVICE void add_quads(const float* vector, const Block& block, int i, float (&y)[kBatch][4]) {
  float more[kBatch][4];
#pragma unroll
  for (int b = 0; b < kBatch; ++b) load_quad<wide>(vector, block, i + b, more[b]);
#pragma unroll
  for (int b = 0; b < kBatch; ++b) {
#pragma unroll
    for (int c = 0; c < 4; ++c) y[b][c] = __fadd_rn(y[b][c], more[b][c]);
  }
}

// Adds all raw sources after the first.
template <bool wide>
BAGUA_DEVICE void add_raws(const Work& work, const Block& block, int i, float (&y)[kBatch][4]) {
#pragma unroll 1
  for (int k = 1; k < work.raws; ++k) add_quads<wide>(static_cast<const float*>(work.inputs[k]), block, i, y);
}

// An element of a message. Positions come from another host: invalid ones, outside the block, are passed over.
struct Entry {
  uint32_t position;
  float value;
};

BAGUA_DEVICE Entry load_entry(const Work& work, const Block& block, int input, uint32_t k) {
  if (input >= work.input_count || k >= block.kept) return {kNowhere, 0.0f};
  const auto* bytes = static_cast<const uint8_t*>(work.inputs[input]);
  const auto* values = reinterpret_cast<const float*>(bytes) + block.kept_before;
  const auto* positions = reinterpret_cast<const uint16_t*>(bytes + work.parameters_at) + block.kept_before;
  return {__ldcs(positions + k), __ldcs(values + k)};
}

BAGUA_DEVICE void add_entry(const Block& block, const Entry& entry) {
  if (entry.position >= block.count) return;
  float& y = shared().y[place_of(entry.position)];
  y = __fadd_rn(y, entry.value);
}

// The thread's first element of kMessages messages from input `first` on.
BAGUA_DEVICE void load_entries(const Work& work, const Block& block, int first, Entry (&entries)[kMessages]) {
#pragma unroll
  for (int b = 0; b < kMessages; ++b) entries[b] = load_entry(work, block, first + b, threadIdx.x);
}

// Sums all sources in shared memory. Messages are added one after the other, as their elements can lie anywhere.
template <bool wide>
BAGUA_DEVICE void gather_with_messages(const Work& work, const Block& block) {
  Entry entries[kMessages];
  load_entries(work, block, work.raws, entries);  // the compiler would move the wait for the copies before them
  copy_first<wide>(work, block);
  wait_for_copies();
  if (work.raws > 1) {
#pragma unroll 1
    for (int i = 0; i < kQuads; i += kBatch) {
      float y[kBatch][4];
      read_quads(i, y);
      add_raws<wide>(work, block, i, y);
      write_quads(y, i);
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int first = work.raws; first < work.input_count; first += kMessages) {
#pragma unroll
    for (int b = 0; b < kMessages; ++b) {
      if (first + b >= work.input_count) break;
      add_entry(block, entries[b]);
#pragma unroll 1
      for (uint32_t k = threadIdx.x + kThreads; k < block.kept; k += kThreads) {
        add_entry(block, load_entry(work, block, first + b, k));
      }
      __syncthreads();
    }
    load_entries(work, block, first + kMessages, entries);
  }
}

template <bool wide>
BAGUA_DEVICE void scale(const Work& work, const Block& block, int i, float (&y)[kBatch][4]) {
#pragma unroll
  for (int b = 0; b < kBatch; ++b) {
#pragma unroll
    for (int c = 0; c < 4; ++c) y[b][c] = __fmul_rn(y[b][c], work.scale);
  }
  if (work.residual != nullptr) add_quads<wide>(work.residual, block, i, y);
}

BAGUA_DEVICE bool has_messages(const Work& work) {
  return work.raws != work.input_count;
}

// Puts the sum of all sources into shared memory, but without further raw ones if there are no messages: these wait for
// finish_quads().
template <bool wide>
BAGUA_DEVICE void gather(const Work& work, const Block& block) {
  if (has_messages(work)) {
    gather_with_messages<wide>(work, block);
  } else {
    copy_first<wide>(work, block);
    wait_for_copies();
  }
}

// The final y of the thread's kBatch quads from quad `i` on.
template <bool wide>
BAGUA_DEVICE void finish_quads(const Work& work, const Block& block, int i, float (&y)[kBatch][4]) {
  read_quads(i, y);
  if (!has_messages(work)) add_raws<wide>(work, block, i, y);
  if (work.scaled) scale<wide>(work, block, i, y);
}

// Counts a group by its largest magnitude. NaN counts as infinity, so that the bin found is not too high.
BAGUA_DEVICE void count_group(float most) {
  atomicAdd(&shared().bins[min(bits_of(most), kInfinity) >> kGroupShift], 1u);
}

// Leaves the final y in shared memory, and counts groups by the first digit of their largest element.
template <bool wide>
BAGUA_DEVICE void finish(const Work& work, const Block& block, Groups groups) {
  const bool changed = work.scaled || (work.raws > 1 && !has_messages(work));
  float most = 0;
#pragma unroll 1
  for (int i = 0; i < kQuads; i += kBatch) {
    float y[kBatch][4];
    finish_quads<wide>(work, block, i, y);
    if (changed) write_quads(y, i);
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const float of_quad =
          max_or_nan(max_or_nan(fabsf(y[b][0]), fabsf(y[b][1])), max_or_nan(fabsf(y[b][2]), fabsf(y[b][3])));
      if (groups == Groups::kOfQuads) count_group(of_quad);
      most = max_or_nan(most, of_quad);
    }
  }
  if (groups == Groups::kOfThreads) count_group(most);
  const uint32_t largest = __reduce_max_sync(kAllLanes, bits_of(most));
  if (lane_of_thread() == 0) shared().largest[threadIdx.x / 32] = largest;
  __syncthreads();
}

BAGUA_DEVICE void write_message(const Work& work, const Block& block, Kept kept) {
  auto* values = reinterpret_cast<float*>(work.message) + block.kept_before;
  auto* positions = reinterpret_cast<uint16_t*>(work.message + work.parameters_at) + block.kept_before;
  uint32_t at = kept.at + static_cast<uint32_t>(__popc(kept.elements));
  for (uint32_t left = kept.elements; left != 0;) {
    const uint32_t e = highest_bit(left);
    left ^= 1u << e;
    --at;
    values[at] = shared().y[place_of_owned(e)];
    positions[at] = static_cast<uint16_t>(32 * threadIdx.x + e);
  }
}

// Writes residual and outputs.
template <bool wide>
BAGUA_DEVICE void write_decoded(const Work& work, const Block& block) {
#pragma unroll 2
  for (int i = 0; i < kQuads; ++i) {
    const uint32_t first = first_of_quad(i);
    const uint32_t kept = shared().kept[first / 32] >> first % 32;
    float y[4];
    float decoded[4];
    read_shared(place_of_quad(i), y);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const bool is_kept = (kept >> c & 1) != 0;
      decoded[c] = is_kept ? y[c] : 0.0f;
      y[c] = is_kept ? 0.0f : zero_unless_finite(y[c]);
    }
    for (int j = 0; j < work.decodeds; ++j) store_quad<wide>(decoded, block, i, work.decoded[j]);
    if (work.residual != nullptr) store_quad<wide>(y, block, i, work.residual);
  }
}

template <bool wide>
BAGUA_DEVICE void write_sum(const Work& work, const Block& block) {
#pragma unroll 1
  for (int i = 0; i < kQuads; i += kBatch) {
    float y[kBatch][4];
    finish_quads<wide>(work, block, i, y);
    for (int j = 0; j < work.decodeds; ++j) {
#pragma unroll
      for (int b = 0; b < kBatch; ++b) store_quad<wide>(y[b], block, i + b, work.decoded[j]);
    }
  }
}

template <bool wide>
BAGUA_DEVICE void transcode_block(const Work& work, const Block& block) {
  gather<wide>(work, block);
  if (work.message == nullptr) {
    write_sum<wide>(work, block);
    return;
  }
  const Groups groups = groups_for(block.kept);
  finish<wide>(work, block, groups);
  const Kept kept = select(block, groups);
  write_message(work, block, kept);
  if (work.residual == nullptr && work.decodeds == 0) return;
  shared().kept[threadIdx.x] = kept.elements;
  __syncthreads();
  write_decoded<wide>(work, block);
}

template <bool wide>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    transcode_top_k(const __grid_constant__ Range range) {
  const Work& work = range.work;
  for (uint32_t b = threadIdx.x; b < kBins; b += kThreads) shared().bins[b] = 0;
  __syncthreads();
  for (uint64_t number = range.first + blockIdx.x; number < range.end; number += gridDim.x) {
    Block block;
    block.begin = number * kBlock;
    block.count = static_cast<uint32_t>(min(work.count - block.begin, uint64_t{kBlock}));
    block.kept = kept_of(block.count, work.density);
    block.kept_before = number * kept_of(kBlock, work.density);
    transcode_block<wide>(work, block);
    __syncthreads();
  }
}

// Number of thread blocks that a multiprocessor of the current device can hold. Queried once per device.
template <bool wide>
cudaError_t resident_blocks(int* blocks) {
  static std::atomic<int> known[64];
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  std::atomic<int>* const slot = device < static_cast<int>(std::size(known)) ? known + device : nullptr;
  *blocks = slot == nullptr ? 0 : slot->load(std::memory_order_relaxed);
  if (*blocks != 0) return cudaSuccess;
  error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, transcode_top_k<wide>, kThreads, sizeof(Shared));
  if (error == cudaSuccess && slot != nullptr) slot->store(*blocks, std::memory_order_relaxed);
  return error;
}

template <bool wide>
cudaError_t launch_range(const Range& range, On on) {
  if (range.first == range.end) return cudaSuccess;
  const auto kernel = transcode_top_k<wide>;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int{sizeof(Shared)});
  if (error != cudaSuccess) return error;
  int resident = 0;
  error = resident_blocks<wide>(&resident);
  if (error != cudaSuccess) return error;
  return launch(kernel, range, range.end - range.first, resident, kThreads, sizeof(Shared), on);
}

}  // namespace

cudaError_t launch_top_k(const Work& work, On on) {
  const uint64_t blocks = codec::blocks_of(work.count, kBlock);
  const uint64_t wide = work.aligned ? work.count / kBlock : 0;
  const cudaError_t error = launch_range<true>({work, 0, wide}, on);
  return error != cudaSuccess ? error : launch_range<false>({work, wide, blocks}, on);
}

}  // namespace bagua::cuda
