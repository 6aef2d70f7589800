// The part of CUDA that csrc/gpu/kernels use, on a processor: their source is compiled as C++ with this header in
// the place of NVIDIA's, and runs as it is. Every thread of a block is a fiber of its own; where a warp or a block has
// to meet (shuffles, reductions, barriers) a fiber waits for the others. Blocks run one after the other.
//
// Stricter than a device: all 32 lanes of a warp have to meet, and in the same operation; a thread that has ended, or a
// warp at another place, ends the program. Order of threads: see set_order(); results must not depend on it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <set>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __shared__ thread_local
#define __launch_bounds__(...)

struct uint2 {
  uint32_t x, y;
} __attribute__((aligned(8)));
struct uint4 {
  uint32_t x, y, z, w;
} __attribute__((aligned(16)));
inline uint2 make_uint2(uint32_t x, uint32_t y) {
  return {x, y};
}
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  return {x, y, z, w};
}
struct dim3 {
  unsigned x, y, z;
  explicit dim3(unsigned x_, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorMisalignedAddress = 716 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
using cudaStream_t = struct CUstream_st*;

namespace emulation {

constexpr size_t kMostShared = 160 * 1024;  // of a block, dynamic
constexpr unsigned kMultiprocessors = 2;    // so that kernels go round their loops

struct Place {
  unsigned x;
};
// Where the running fiber is.
struct Position {
  Place thread, block, block_size, grid_size;
};
extern Position here;

enum class Meeting : int { kNone, kShuffle, kBallot, kMaximum, kMinimum, kSum, kWarp, kBlock };

// Dynamic shared memory of the running block.
unsigned char* dynamic_shared_of_block();

// All lanes of the warp give a value, wait for each other, and see all 32.
const uint32_t* exchange(Meeting meeting, uint32_t value);
void meet_block();

using Body = void (*)(void* context);
// Runs body(context) as every thread of the grid. `shared_bytes`: what dynamic shared memory may be used.
void run_grid(unsigned blocks, unsigned threads, size_t shared_bytes, Body body, void* context);
// Kernels that were loaded, and those that were launched.
extern std::set<const void*> loaded, launched;
// 0: threads of a block go first to last, 1: last to first.
void set_order(int order);

inline uint32_t reduced(Meeting meeting, uint32_t value, uint32_t (*combine)(uint32_t, uint32_t)) {
  const uint32_t* all = exchange(meeting, value);
  uint32_t result = all[0];
  for (int l = 1; l < 32; ++l) result = combine(result, all[l]);
  return result;
}

template <class T>
inline uint32_t word_of(T v) {
  static_assert(sizeof(T) == 4, "one word");
  uint32_t word;
  std::memcpy(&word, &v, 4);
  return word;
}
template <class T>
inline T from_word(uint32_t word) {
  T v;
  std::memcpy(&v, &word, 4);
  return v;
}

}  // namespace emulation

#define threadIdx (emulation::here.thread)
#define blockIdx (emulation::here.block)
#define blockDim (emulation::here.block_size)
#define gridDim (emulation::here.grid_size)

using std::max;
using std::min;

inline uint32_t __float_as_uint(float v) {
  return emulation::word_of(v);
}
inline float __uint_as_float(uint32_t bits) {
  return emulation::from_word<float>(bits);
}
namespace emulation {
// A device gives this NaN for every NaN that goes into an operation or comes out of it.
inline float calculated(float v) {
  return v != v ? from_word<float>(0x7fffffffu) : v;
}
}  // namespace emulation
// Compiled without contraction: one rounding each.
inline float __fadd_rn(float a, float b) {
  return emulation::calculated(a + b);
}
inline float __fsub_rn(float a, float b) {
  return emulation::calculated(a - b);
}
inline float __fmul_rn(float a, float b) {
  return emulation::calculated(a * b);
}
inline float __fdiv_rn(float a, float b) {
  return emulation::calculated(a / b);
}
inline float __fmaf_rn(float a, float b, float c) {
  return emulation::calculated(std::fma(a, b, c));
}
inline int __popc(uint32_t v) {
  return __builtin_popcount(v);
}
inline int __mulhi(int a, int b) {
  return static_cast<int>((int64_t{a} * b) >> 32);
}
inline int __clz(int v) {
  return v == 0 ? 32 : __builtin_clz(static_cast<unsigned>(v));
}
// Number of the lowest bit that is set, from 1; 0: there is none.
inline int __ffs(int v) {
  return __builtin_ffs(v);
}
inline uint32_t __funnelshift_l(uint32_t low, uint32_t high, uint32_t shift) {
  return static_cast<uint32_t>(((uint64_t{high} << 32 | low) << (shift & 31)) >> 32);
}
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t both = uint64_t{b} << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t nibble = selector >> (4 * i) & 15;
    const auto byte = static_cast<uint8_t>(both >> (8 * (nibble & 7)));
    result |= static_cast<uint32_t>((nibble & 8) != 0 ? (byte >> 7) * 0xff : byte) << (8 * i);
  }
  return result;
}

template <class T>
inline T __ldcs(const T* from) {
  return *from;
}

template <class T>
inline T __shfl_sync(uint32_t, T v, int lane) {
  return emulation::from_word<T>(emulation::exchange(emulation::Meeting::kShuffle, emulation::word_of(v))[lane & 31]);
}
template <class T>
inline T __shfl_xor_sync(uint32_t mask, T v, int other) {
  return __shfl_sync(mask, v, static_cast<int>(emulation::here.thread.x % 32) ^ other);
}
// From outside the warp comes the lane's own value.
template <class T>
inline T __shfl_up_sync(uint32_t mask, T v, unsigned delta) {
  const unsigned lane = emulation::here.thread.x % 32;
  return __shfl_sync(mask, v, static_cast<int>(lane >= delta ? lane - delta : lane));
}
template <class T>
inline T __shfl_down_sync(uint32_t mask, T v, unsigned delta) {
  const unsigned lane = emulation::here.thread.x % 32;
  return __shfl_sync(mask, v, static_cast<int>(lane + delta < 32 ? lane + delta : lane));
}
inline uint32_t __reduce_max_sync(uint32_t, uint32_t v) {
  return emulation::reduced(emulation::Meeting::kMaximum, v, [](uint32_t a, uint32_t b) { return max(a, b); });
}
inline uint32_t __reduce_add_sync(uint32_t, uint32_t v) {
  return emulation::reduced(emulation::Meeting::kSum, v, [](uint32_t a, uint32_t b) { return a + b; });
}
inline int __reduce_max_sync(uint32_t, int v) {
  return static_cast<int>(emulation::reduced(
      emulation::Meeting::kMaximum, static_cast<uint32_t>(v),
      [](uint32_t a, uint32_t b) { return static_cast<uint32_t>(max(static_cast<int>(a), static_cast<int>(b))); }));
}
inline int __reduce_min_sync(uint32_t, int v) {
  return static_cast<int>(emulation::reduced(
      emulation::Meeting::kMinimum, static_cast<uint32_t>(v),
      [](uint32_t a, uint32_t b) { return static_cast<uint32_t>(min(static_cast<int>(a), static_cast<int>(b))); }));
}
inline void __syncwarp() {
  emulation::exchange(emulation::Meeting::kWarp, 0);
}
inline void __syncthreads() {
  emulation::meet_block();
}
// Fibers are switched at meetings alone.
inline uint32_t atomicAdd(uint32_t* at, uint32_t v) {
  const uint32_t before = *at;
  *at += v;
  return before;
}

inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = emulation::kMultiprocessors;
  return cudaSuccess;
}
struct cudaFuncAttributes {};
template <class Kernel>
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, Kernel* kernel) {
  emulation::loaded.insert(reinterpret_cast<const void*>(kernel));
  return cudaSuccess;
}
template <class Kernel>
inline cudaError_t cudaFuncSetAttribute(Kernel*, cudaFuncAttribute, int bytes) {
  return static_cast<size_t>(bytes) <= emulation::kMostShared ? cudaSuccess : cudaErrorInvalidValue;
}

template <class Kernel>
inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel*, int, size_t shared_bytes) {
  *blocks = static_cast<int>(emulation::kMostShared / shared_bytes);
  return cudaSuccess;
}

template <class Argument>
inline cudaError_t cudaLaunchKernel(void (*kernel)(Argument), dim3 grid, dim3 block, void** arguments,
                                    size_t shared_bytes, cudaStream_t) {
  struct Call {
    void (*kernel)(Argument);
    Argument argument;
  };
  Call call{kernel, *static_cast<Argument*>(arguments[0])};
  emulation::launched.insert(reinterpret_cast<const void*>(kernel));
  const auto body = [](void* context) {
    const auto* made = static_cast<const Call*>(context);
    made->kernel(made->argument);
  };
  emulation::run_grid(grid.x, block.x, shared_bytes, body, &call);
  return cudaSuccess;
}
