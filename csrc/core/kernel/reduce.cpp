#include "kernel/reduce.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "kernel/half.h"
#include "kernel/lanes.h"

namespace bagua {
namespace {

// Operations that update an accumulator, which is one element or a vector. Where it makes no difference (kWraps),
// signed integers are reduced as unsigned ones, so that overflow wraps around.
struct Sum {
  static constexpr bool kWraps = true;
  template <class A>
  static void apply(A& a, const A& b) {
    a += b;
  }
};

struct Product {
  static constexpr bool kWraps = true;
  template <class A>
  static void apply(A& a, const A& b) {
    if constexpr (std::is_same_v<A, uint16_t>) {
      a = static_cast<uint16_t>(uint32_t{a} * b);  // C++ would multiply uint16_t as int, which can overflow
    } else {
      a *= b;
    }
  }
};

// NaN if either operand is NaN.
struct Min {
  static constexpr bool kWraps = false;
  template <class A>
  static void apply(A& a, const A& b) {
    a = (a < b) | (a != a) ? a : b;
  }
};

struct Max {
  static constexpr bool kWraps = false;
  template <class A>
  static void apply(A& a, const A& b) {
    a = (a > b) | (a != a) ? a : b;
  }
};

struct Or {
  static constexpr bool kWraps = false;
  template <class A>
  static void apply(A& a, const A& b) {
    a |= b;
  }
};

struct And {
  static constexpr bool kWraps = false;
  template <class A>
  static void apply(A& a, const A& b) {
    a &= b;
  }
};

struct Xor {
  static constexpr bool kWraps = false;
  template <class A>
  static void apply(A& a, const A& b) {
    a ^= b;
  }
};

// T itself, or the unsigned type of its size where the operation wraps.
template <class T, bool integral>
struct Wrapping {
  using type = T;
};
template <class T>
struct Wrapping<T, true> {
  using type = std::make_unsigned_t<T>;
};

// Divides a sum to get the mean. If the divisor is a power of two it multiplies by the inverse: same bits.
template <class T, class Acc>
class Divider {
 public:
  explicit Divider(int64_t divisor)
      : divisor_(divisor),
        exact_((divisor & (divisor - 1)) == 0),
        factor_(static_cast<Acc>(exact_ ? 1.0 / static_cast<double>(divisor) : static_cast<double>(divisor))) {}
  // Divides one accumulator.
  void apply(Acc& a) const {
    if constexpr (!std::is_floating_point_v<Acc>) {
      a = static_cast<Acc>(static_cast<int64_t>(static_cast<T>(a)) / divisor_);  // toward zero
    } else if (exact_) {
      a *= factor_;
    } else {
      a /= factor_;
    }
  }
  void apply(Vector<Acc>* v) const {
    if constexpr (!std::is_floating_point_v<Acc>) {
      Acc values[kVectorBytes / sizeof(Acc)];
      std::memcpy(values, v, kVectorBytes);
      for (Acc& value : values) apply(value);
      std::memcpy(v, values, kVectorBytes);
    } else if (exact_) {
      *v *= factor_;
    } else {
      *v /= factor_;
    }
  }

 private:
  int64_t divisor_;
  bool exact_;
  Acc factor_;  // floating point: factor, or divisor if not exact_
};

// One call of reduce() for memory type T. Lanes use T, or its unsigned counterpart where kWraps.
template <class T, class Op>
struct Reduction {
  using U = typename Wrapping<T, std::is_integral_v<T> && Op::kWraps>::type;
  using L = Lanes<U>;
  using V = typename L::V;
  using Acc = typename L::Acc;

  const void* const* src;
  int n;
  void* const* dst;
  int m;
  int64_t divisor;

  const U* source(int k, size_t i) const { return static_cast<const U*>(src[k]) + i; }
  U* target(int j, size_t i) const { return static_cast<U*>(dst[j]) + i; }

  // Reduces elements [first, last) one by one.
  void scalars(size_t first, size_t last) const {
    const Divider<T, Acc> divider(divisor);
    for (size_t i = first; i < last; ++i) {
      Acc acc = L::load_one(source(0, i));
      for (int k = 1; k < n; ++k) Op::apply(acc, static_cast<const Acc&>(L::load_one(source(k, i))));
      if (divisor > 1) divider.apply(acc);
      for (int j = 0; j < m; ++j) L::store_one(acc, target(j, i));
    }
  }

  // Reduces whole groups from `first` on; returns the first element that is left.
  size_t groups(size_t first, size_t last, bool nontemporal) const {
    const Divider<T, Acc> divider(divisor);
    size_t i = first;
    for (; last - i >= L::kCount; i += L::kCount) {
      V acc[kVectors];
      for (int q = 0; q < kVectors; ++q) L::load(source(0, i), q, &acc[q]);
      for (int k = 1; k < n; ++k) {
        for (int q = 0; q < kVectors; ++q) {
          V next;
          L::load(source(k, i), q, &next);
          Op::apply(acc[q], next);
        }
      }
      if (divisor > 1) {
        for (int q = 0; q < kVectors; ++q) divider.apply(&acc[q]);
      }
      const typename L::Packed packed(acc);
      for (int j = 0; j < m; ++j) {
        U* to = target(j, i);
        packed.store(to, nontemporal && reinterpret_cast<uintptr_t>(to) % kVectorBytes == 0);
      }
    }
    return i;
  }
};

template <class T, class Op>
void run(const void* const* src, int n, void* const* dst, int m, size_t count, int64_t divisor, bool nontemporal) {
  const Reduction<T, Op> reduction{src, n, dst, m, divisor};
  // Non-temporal stores need whole cache lines: begin at the first line boundary of the first destination.
  const size_t past_line = reinterpret_cast<uintptr_t>(dst[0]) % 64;
  const size_t edge = nontemporal && past_line != 0 ? std::min(count, (64 - past_line) / sizeof(T)) : 0;
  reduction.scalars(0, edge);
  reduction.scalars(reduction.groups(edge, count, nontemporal), count);
}

using Kernel = void (*)(const void* const*, int, void* const*, int, size_t, int64_t, bool);

template <class T>
Kernel float_kernel(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
      return run<T, Sum>;
    case ReduceOp::kProduct:
      return run<T, Product>;
    case ReduceOp::kMin:
      return run<T, Min>;
    case ReduceOp::kMax:
      return run<T, Max>;
    default:
      return nullptr;
  }
}

template <class T>
Kernel bit_kernel(ReduceOp op) {
  switch (op) {
    case ReduceOp::kMin:
      return run<T, Min>;
    case ReduceOp::kMax:
      return run<T, Max>;
    case ReduceOp::kBor:
      return run<T, Or>;
    case ReduceOp::kBand:
      return run<T, And>;
    case ReduceOp::kBxor:
      return run<T, Xor>;
    default:
      return nullptr;
  }
}

template <class T>
Kernel integer_kernel(ReduceOp op) {
  if (op == ReduceOp::kSum || op == ReduceOp::kAvg) return run<T, Sum>;
  if (op == ReduceOp::kProduct) return run<T, Product>;
  return bit_kernel<T>(op);
}

// Returns nullptr if the combination is not supported.
Kernel find_kernel(DType t, ReduceOp op) {
  switch (t) {
    case DType::kF32:
      return float_kernel<float>(op);
    case DType::kF64:
      return float_kernel<double>(op);
    case DType::kF16:
      return float_kernel<Half>(op);
    case DType::kBF16:
      return float_kernel<BFloat16>(op);
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

void reduce(DType t, ReduceOp op, const void* const* src, int n, void* const* dst, int m, size_t count, int64_t divisor,
            bool nontemporal) {
  const Kernel kernel = find_kernel(t, op);
  if (kernel == nullptr || n < 1 || m < 1 || count == 0) return;
  kernel(src, n, dst, m, count, op == ReduceOp::kAvg ? divisor : 1, nontemporal);
  if (nontemporal) store_fence();
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
