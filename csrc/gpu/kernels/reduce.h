// Reductions: one pass over all inputs, element by element.
//
// Memory traffic per element: its size, once for each input and once for the output. Target: 85 % of the bandwidth of a
// copy. A thread has 16 (8-bit types) to 64 bytes of an input in flight, and the 1024 threads of a multiprocessor 16 to
// 64 KiB. Slower cases: the mean of 64-bit integers, and buffers that do not have the same offset from a multiple of 16
// bytes.
#pragma once

#include <type_traits>

#include "gpu/kernels/device.h"
#include "gpu/kernels/half.h"
#include "gpu/kernels/kernels.h"
#include "gpu/kernels/launch.h"
#include "kernel/reduce.h"

namespace bagua::cuda {

constexpr int kThreads = 256;
constexpr int kBlocksPerMultiprocessor = 4;  // at most 64 registers for a thread

enum class Division : int32_t { kNone, kMultiply, kDivide };

struct Reduce {
  const void* inputs[BAGUA_KERNELS_MOST_REDUCED];
  void* output;
  uint64_t count;
  uint64_t head;  // elements before the first that is aligned to 16 bytes in all buffers; count: there is none
  int64_t divisor;
  double factor;    // floating point: factor or divisor
  int32_t inverse;  // 2^31 / divisor and a little more
  int32_t input_count;
  Division division;
};

struct Min;
struct Max;

// Type T in memory and Acc in registers.
template <class T, class Op>
struct Memory {
  using Acc = T;
  static BAGUA_DEVICE Acc load(T v) { return v; }
  static BAGUA_DEVICE T store(Acc v) { return v; }
};
template <class Op>
struct Memory<BFloat16, Op> {
  using Acc = float;
  static BAGUA_DEVICE float load(BFloat16 v) { return BFloat16::unpack(v.bits); }
  static BAGUA_DEVICE BFloat16 store(float v) {
    constexpr bool kOneOfThem = std::is_same_v<Op, Min> || std::is_same_v<Op, Max>;
    return {static_cast<uint16_t>(kOneOfThem ? BFloat16::pack_exact(v) : BFloat16::pack_number(v))};
  }
};
template <class Op>
struct Memory<Half, Op> {
  using Acc = float;
  static BAGUA_DEVICE float load(Half v) { return Half::unpack_number(v.bits); }
  static BAGUA_DEVICE Half store(float v) { return {static_cast<uint16_t>(Half::pack_number(v))}; }
};
// The result is one of the two operands. A NaN keeps its bits, but becomes quiet.
struct HalfInOrder {
  using Acc = Half;
  static BAGUA_DEVICE Half load(Half v) { return v; }
  static BAGUA_DEVICE Half store(Half v) { return {static_cast<uint16_t>(v != v ? v.bits | 0x200u : v.bits)}; }
};
template <>
struct Memory<Half, Min> : HalfInOrder {};
template <>
struct Memory<Half, Max> : HalfInOrder {};

// Signed integers are reduced as unsigned ones where overflow wraps around; small ones are computed as uint32_t.
struct Sum {
  static constexpr bool kDivides = true;
  template <class A>
  static BAGUA_DEVICE A apply(A a, A b) {
    return static_cast<A>(a + b);
  }
};
struct Product {
  static constexpr bool kDivides = false;
  template <class A>
  static BAGUA_DEVICE A apply(A a, A b) {
    if constexpr (sizeof(A) < 4) return static_cast<A>(uint32_t{a} * b);
    return static_cast<A>(a * b);
  }
};
// NaN if either operand is NaN.
struct Min {
  static constexpr bool kDivides = false;
  template <class A>
  static BAGUA_DEVICE A apply(A a, A b) {
    return a < b || a != a ? a : b;
  }
};
struct Max {
  static constexpr bool kDivides = false;
  template <class A>
  static BAGUA_DEVICE A apply(A a, A b) {
    return a > b || a != a ? a : b;
  }
};
struct Or {
  static constexpr bool kDivides = false;
  template <class A>
  static BAGUA_DEVICE A apply(A a, A b) {
    return static_cast<A>(a | b);
  }
};
struct And {
  static constexpr bool kDivides = false;
  template <class A>
  static BAGUA_DEVICE A apply(A a, A b) {
    return static_cast<A>(a & b);
  }
};
struct Xor {
  static constexpr bool kDivides = false;
  template <class A>
  static BAGUA_DEVICE A apply(A a, A b) {
    return static_cast<A>(a ^ b);
  }
};

// Divides a sum to get the mean. S: the requested type, signed or not.
template <class S, class Acc>
BAGUA_DEVICE Acc divide(Acc v, const Reduce& work) {
  if constexpr (std::is_floating_point_v<Acc>) {
    const Acc factor = static_cast<Acc>(work.factor);
    return work.division == Division::kMultiply ? v * factor : v / factor;
  } else if constexpr (sizeof(S) <= 2) {
    // Truncates toward zero, too: the error of the inverse, times 2^15, is smaller than the distance to the next
    // quotient.
    const int dividend = static_cast<S>(v);
    return static_cast<Acc>(__mulhi(2 * dividend, work.inverse) + (dividend < 0 ? 1 : 0));
  } else {
    return static_cast<Acc>(static_cast<int64_t>(static_cast<S>(v)) / work.divisor);  // toward zero
  }
}

// kWidth neighbours, loaded or stored by one access.
template <class T, int kWidth>
struct Piece {
  T values[kWidth];
};

template <class T, int kWidth>
BAGUA_DEVICE Piece<T, kWidth> load_piece(const T* from) {
  Piece<T, kWidth> piece;
  if constexpr (kWidth == 1) {
    piece.values[0] = *from;
  } else {
    static_assert(sizeof piece == 16, "one access");
    const uint4 words = __ldcs(reinterpret_cast<const uint4*>(from));
    memcpy(&piece, &words, 16);
  }
  return piece;
}

template <class T, int kWidth>
BAGUA_DEVICE void store_piece(const Piece<T, kWidth>& piece, T* to) {
  if constexpr (kWidth == 1) {
    *to = piece.values[0];
  } else {
    uint4 words;
    memcpy(&words, &piece, 16);
    store_vector(reinterpret_cast<uint4*>(to), words);
  }
}

// Loads pieces `at`, at + stride, ... of an input; pieces from `end` on stay unchanged.
template <class T, int kWidth, int kPieces>
BAGUA_DEVICE void load_pieces(const T* from, uint64_t at, uint64_t stride, uint64_t end,
                              Piece<T, kWidth> (&to)[kPieces]) {
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    if (at + p * stride < end) to[p] = load_piece<T, kWidth>(from + (at + p * stride) * kWidth);
  }
}

// Reduces kPieces pieces of kWidth elements, counted from element `base`; only those before `end`.
template <class S, class T, class Op, int kWidth, int kPieces>
BAGUA_DEVICE void reduce_pieces(const Reduce& work, uint64_t base, uint64_t at, uint64_t stride, uint64_t end) {
  using M = Memory<T, Op>;
  const auto input = [&](int k) { return static_cast<const T*>(work.inputs[k]) + base; };
  typename M::Acc sum[kPieces][kWidth];
  Piece<T, kWidth> next[kPieces];
  load_pieces(input(0), at, stride, end, next);
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sum[p][i] = M::load(next[p].values[i]);
  }
  for (int k = 1; k < work.input_count; ++k) {
    load_pieces(input(k), at, stride, end, next);
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) sum[p][i] = Op::apply(sum[p][i], M::load(next[p].values[i]));
    }
  }
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    Piece<T, kWidth> result;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      typename M::Acc v = sum[p][i];
      if constexpr (Op::kDivides) {
        if (work.division != Division::kNone) v = divide<S>(v, work);
      }
      result.values[i] = M::store(v);
    }
    if (at + p * stride < end) store_piece(result, static_cast<T*>(work.output) + base + (at + p * stride) * kWidth);
  }
}

// Elements per access, and accesses that a thread has in flight: 16 accumulators, or 4 of 64 bits.
template <class T>
struct Shape {
  static constexpr int kWidth = 16 / sizeof(T);
  static constexpr int kPieces = sizeof(T) == 8 ? 2 : static_cast<int>(sizeof(T));
};

template <class S, class T, class Op>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    reduce_elements(const __grid_constant__ Reduce work) {
  constexpr int kWidth = Shape<T>::kWidth;
  constexpr int kPieces = Shape<T>::kPieces;
  const uint64_t pieces = (work.count - work.head) / kWidth;
  const uint64_t of_block = static_cast<uint64_t>(kThreads) * kPieces;
  for (uint64_t at = blockIdx.x * of_block; at < pieces; at += gridDim.x * of_block) {
    reduce_pieces<S, T, Op, kWidth, kPieces>(work, work.head, at + threadIdx.x, kThreads, pieces);
  }
  // Single elements at both ends, or all elements if there is no common alignment.
  const uint64_t threads = static_cast<uint64_t>(gridDim.x) * blockDim.x;
  const uint64_t thread = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
#pragma unroll 1
  for (int end = 0; end < 2; ++end) {
    const uint64_t base = end == 0 ? 0 : work.head + pieces * kWidth;
    const uint64_t count = end == 0 ? work.head : work.count - base;
    for (uint64_t at = thread; at < count; at += 4 * threads) {
      reduce_pieces<S, T, Op, 1, 4>(work, base, at, threads, count);
    }
  }
}

// Number of elements before the first that is aligned to 16 bytes in all buffers; `count` if there is none.
template <class T>
uint64_t head_of(const Reduce& work) {
  const uint64_t past = reinterpret_cast<uintptr_t>(work.output) % 16;
  for (int k = 0; k < work.input_count; ++k) {
    if (reinterpret_cast<uintptr_t>(work.inputs[k]) % 16 != past) return work.count;
  }
  return std::min(work.count, (16 - past) % 16 / sizeof(T));
}

using Run = cudaError_t (*)(Reduce&, On);

// S: the requested type; T: the type to compute with.
template <class S, class T, class Op>
cudaError_t run(Reduce& work, On on) {
  work.head = head_of<T>(work);
  const uint64_t of_block = static_cast<uint64_t>(kThreads) * Shape<T>::kPieces * Shape<T>::kWidth;
  const uint64_t blocks = work.count / of_block + 1;
  return launch(reduce_elements<S, T, Op>, work, blocks, kBlocksPerMultiprocessor, kThreads, 0, on);
}

// The kernel for integers; nullptr: not supported. It has a file of its own because both take long to compile.
Run find_integer_reduce(DType dtype, ReduceOp op);

// Loads the kernels of all dtypes and operations.
cudaError_t load_reductions();

}  // namespace bagua::cuda
