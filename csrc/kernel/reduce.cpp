#include "kernel/reduce.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "kernel/half.h"
#include "kernel/stream_copy.h"

namespace bagua {
namespace {

// Elements handled at a time: all sources are reduced into one block, which stays in the first-level cache, and the
// block is then written to all destinations.
constexpr size_t kBlock = 2048;

struct Sum {
  template <class A>
  static A apply(A a, A b) {
    if constexpr (std::is_integral_v<A>) {  // wraps around, without undefined behaviour
      using U = std::make_unsigned_t<A>;
      return static_cast<A>(static_cast<U>(static_cast<U>(a) + static_cast<U>(b)));
    } else {
      return a + b;
    }
  }
};

struct Product {
  template <class A>
  static A apply(A a, A b) {
    if constexpr (std::is_integral_v<A>) {
      // At least 32 bits wide: the product of two uint16_t would be a signed int, and could overflow.
      using U = std::common_type_t<std::make_unsigned_t<A>, unsigned>;
      return static_cast<A>(static_cast<U>(a) * static_cast<U>(b));
    } else {
      return a * b;
    }
  }
};

struct Min {
  template <class A>
  static A apply(A a, A b) {
    return (a < b) | (a != a) ? a : b;
  }
};

struct Max {
  template <class A>
  static A apply(A a, A b) {
    return (a > b) | (a != a) ? a : b;
  }
};

struct Or {
  template <class A>
  static A apply(A a, A b) {
    return static_cast<A>(a | b);
  }
};

struct And {
  template <class A>
  static A apply(A a, A b) {
    return static_cast<A>(a & b);
  }
};

struct Xor {
  template <class A>
  static A apply(A a, A b) {
    return static_cast<A>(a ^ b);
  }
};

// The loops below get no overlapping pointers: acc is always a local block.
template <class Op, class A>
void combine(A* acc, const A* a, size_t n) {
#pragma GCC ivdep
  for (size_t i = 0; i < n; ++i) acc[i] = Op::template apply<A>(acc[i], a[i]);
}

template <class Op, class A>
void combine(A* acc, const A* a, const A* b, size_t n) {
#pragma GCC ivdep
  for (size_t i = 0; i < n; ++i) acc[i] = Op::template apply<A>(Op::template apply<A>(acc[i], a[i]), b[i]);
}

template <class Op, class A>
void start(A* acc, const A* a, const A* b, size_t n) {
#pragma GCC ivdep
  for (size_t i = 0; i < n; ++i) acc[i] = Op::template apply<A>(a[i], b[i]);
}

template <class Op, class A>
void start(A* acc, const A* a, const A* b, const A* c, const A* d, size_t n) {
  // In the order of the sources, as the loops with fewer: the result must not depend on how they are grouped.
#pragma GCC ivdep
  for (size_t i = 0; i < n; ++i) {
    acc[i] = Op::template apply<A>(Op::template apply<A>(Op::template apply<A>(a[i], b[i]), c[i]), d[i]);
  }
}

template <class A>
void divide(A* acc, size_t n, int64_t divisor) {
  if constexpr (std::is_floating_point_v<A>) {
    if ((divisor & (divisor - 1)) == 0) {  // a power of two: the product is the quotient, bit for bit
      const A factor = A{1} / static_cast<A>(divisor);
      for (size_t i = 0; i < n; ++i) acc[i] *= factor;
    } else {
      const A by = static_cast<A>(divisor);
      for (size_t i = 0; i < n; ++i) acc[i] /= by;
    }
  } else {
    for (size_t i = 0; i < n; ++i) acc[i] = static_cast<A>(static_cast<int64_t>(acc[i]) / divisor);
  }
}

void write_all(const void* block, void* const* dst, int m, size_t offset, size_t bytes, bool nontemporal) {
  for (int j = 0; j < m; ++j) {
    char* to = static_cast<char*>(dst[j]) + offset;
    if (nontemporal) {
      stream_copy(to, block, bytes);
    } else {
      std::memcpy(to, block, bytes);
    }
  }
}

// Elements up to the next 64-byte line of the first destination, so that later blocks begin on a line.
template <class T>
size_t first_block(const void* dst, size_t count) {
  const size_t misaligned = reinterpret_cast<uintptr_t>(dst) % 64 / sizeof(T);
  return std::min(count, kBlock - misaligned);
}

// T is its own accumulator: f32, f64 and the integers.
template <class T, class Op>
void reduce_plain(const void* const* src, int n, void* const* dst, int m, size_t count, int64_t divisor,
                  bool nontemporal) {
  alignas(64) T acc[kBlock];
  const auto at = [src](int k, size_t i) { return static_cast<const T*>(src[k]) + i; };
  size_t length = 0;
  for (size_t i = 0; i < count; i += length) {
    length = i == 0 ? first_block<T>(dst[0], count) : std::min(kBlock, count - i);
    int k = 0;
    if (n >= 4) {
      start<Op, T>(acc, at(0, i), at(1, i), at(2, i), at(3, i), length);
      k = 4;
    } else if (n >= 2) {
      start<Op, T>(acc, at(0, i), at(1, i), length);
      k = 2;
    } else {
      std::memcpy(acc, at(0, i), length * sizeof(T));
      k = 1;
    }
    for (; k + 1 < n; k += 2) combine<Op, T>(acc, at(k, i), at(k + 1, i), length);
    if (k < n) combine<Op, T>(acc, at(k, i), length);
    if (divisor > 1) divide(acc, length, divisor);
    write_all(acc, dst, m, i * sizeof(T), length * sizeof(T), nontemporal);
  }
}

// T is 16 bits wide and accumulates in f32.
template <class T, class Op>
void reduce_half(const void* const* src, int n, void* const* dst, int m, size_t count, int64_t divisor,
                 bool nontemporal) {
  alignas(64) float acc[kBlock];
  alignas(64) float next[kBlock];
  alignas(64) T out[kBlock];
  size_t length = 0;
  for (size_t i = 0; i < count; i += length) {
    length = i == 0 ? first_block<T>(dst[0], count) : std::min(kBlock, count - i);
    to_float(static_cast<const T*>(src[0]) + i, acc, length);
    for (int k = 1; k < n; ++k) {
      to_float(static_cast<const T*>(src[k]) + i, next, length);
      combine<Op, float>(acc, next, length);
    }
    if (divisor > 1) divide(acc, length, divisor);
    from_float(acc, out, length);
    write_all(out, dst, m, i * sizeof(T), length * sizeof(T), nontemporal);
  }
}

using Kernel = void (*)(const void* const*, int, void* const*, int, size_t, int64_t, bool);

template <class T>
Kernel float_kernel(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
      return reduce_plain<T, Sum>;
    case ReduceOp::kProduct:
      return reduce_plain<T, Product>;
    case ReduceOp::kMin:
      return reduce_plain<T, Min>;
    case ReduceOp::kMax:
      return reduce_plain<T, Max>;
    default:
      return nullptr;
  }
}

template <class T>
Kernel half_kernel(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
      return reduce_half<T, Sum>;
    case ReduceOp::kProduct:
      return reduce_half<T, Product>;
    case ReduceOp::kMin:
      return reduce_half<T, Min>;
    case ReduceOp::kMax:
      return reduce_half<T, Max>;
    default:
      return nullptr;
  }
}

template <class T>
Kernel bit_kernel(ReduceOp op) {
  switch (op) {
    case ReduceOp::kMin:
      return reduce_plain<T, Min>;
    case ReduceOp::kMax:
      return reduce_plain<T, Max>;
    case ReduceOp::kBor:
      return reduce_plain<T, Or>;
    case ReduceOp::kBand:
      return reduce_plain<T, And>;
    case ReduceOp::kBxor:
      return reduce_plain<T, Xor>;
    default:
      return nullptr;
  }
}

template <class T>
Kernel integer_kernel(ReduceOp op) {
  if (op == ReduceOp::kSum || op == ReduceOp::kAvg) return reduce_plain<T, Sum>;
  if (op == ReduceOp::kProduct) return reduce_plain<T, Product>;
  return bit_kernel<T>(op);
}

// nullptr: not supported.
Kernel find_kernel(DType t, ReduceOp op) {
  switch (t) {
    case DType::kF32:
      return float_kernel<float>(op);
    case DType::kF64:
      return float_kernel<double>(op);
    case DType::kF16:
      return half_kernel<Half>(op);
    case DType::kBF16:
      return half_kernel<BFloat16>(op);
    case DType::kI32:
      return integer_kernel<int32_t>(op);
    case DType::kI64:
      return integer_kernel<int64_t>(op);
    case DType::kU8:
      return integer_kernel<uint8_t>(op);
    case DType::kBool:
      return bit_kernel<uint8_t>(op);
    case DType::kI8:
      return integer_kernel<int8_t>(op);
    case DType::kI16:
      return integer_kernel<int16_t>(op);
  }
  return nullptr;
}

}  // namespace

size_t dtype_size(DType t) {
  switch (t) {
    case DType::kF64:
    case DType::kI64:
      return 8;
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kF16:
    case DType::kBF16:
    case DType::kI16:
      return 2;
    case DType::kU8:
    case DType::kBool:
    case DType::kI8:
      return 1;
  }
  return 0;
}

const char* dtype_name(DType t) {
  constexpr const char* kNames[kDTypes] = {"float32", "float64", "float16", "bfloat16", "int32",
                                           "int64",   "uint8",   "bool",    "int8",     "int16"};
  const auto index = static_cast<size_t>(t);
  return index < kDTypes ? kNames[index] : "unknown";
}

const char* op_name(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return "SUM";
    case ReduceOp::kProduct:
      return "PRODUCT";
    case ReduceOp::kMin:
      return "MIN";
    case ReduceOp::kMax:
      return "MAX";
    case ReduceOp::kBor:
      return "BOR";
    case ReduceOp::kBand:
      return "BAND";
    case ReduceOp::kBxor:
      return "BXOR";
    case ReduceOp::kAvg:
      return "AVG";
  }
  return "unknown";
}

bool op_supported(DType t, ReduceOp op) {
  return find_kernel(t, op) != nullptr;
}

void reduce(DType t, ReduceOp op, const void* const* src, int n, void* const* dst, int m, size_t count, int64_t divisor,
            bool nontemporal) {
  const Kernel kernel = find_kernel(t, op);
  if (kernel == nullptr || n < 1 || m < 1 || count == 0) return;
  kernel(src, n, dst, m, count, op == ReduceOp::kAvg ? divisor : 1, nontemporal);
  if (nontemporal) stream_fence();
}

void accumulate(DType t, ReduceOp op, void* acc, const void* in, size_t count) {
  const void* const sources[] = {acc, in};
  reduce(t, op, sources, 2, &acc, 1, count, 1, false);
}

void finish(DType t, ReduceOp op, void* data, size_t count, int64_t divisor) {
  if (op != ReduceOp::kAvg || divisor <= 1) return;
  const void* const source = data;
  reduce(t, op, &source, 1, &data, 1, count, divisor, false);
}

}  // namespace bagua
