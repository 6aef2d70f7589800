#include "kernel/reduce.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "kernel/half.h"
#include "kernel/lanes.h"

namespace bagua {
namespace {

// Operations that update an accumulator, which is one element or a vector.
struct Sum {
  template <class A>
  static void apply(A& a, const A& b) {
    a += b;
  }
};

struct Product {
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
  template <class A>
  static void apply(A& a, const A& b) {
    a = (a < b) | (a != a) ? a : b;
  }
};

struct Max {
  template <class A>
  static void apply(A& a, const A& b) {
    a = (a > b) | (a != a) ? a : b;
  }
};

struct Or {
  template <class A>
  static void apply(A& a, const A& b) {
    a |= b;
  }
};

struct And {
  template <class A>
  static void apply(A& a, const A& b) {
    a &= b;
  }
};

struct Xor {
  template <class A>
  static void apply(A& a, const A& b) {
    a ^= b;
  }
};

// Sums and products of signed integers are made of unsigned ones, so that overflow wraps around: the bits are the same.
template <class Op>
constexpr bool kWraps = std::is_same_v<Op, Sum> || std::is_same_v<Op, Product>;

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

// One call of reduce() for memory type T. Lanes use T, or its unsigned counterpart where the operation wraps.
template <class T, class Op>
struct Reduction {
  using U = typename Wrapping<T, std::is_integral_v<T> && kWraps<Op>>::type;
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

// Returns nullptr if the combination is not supported.
template <class T, bool arithmetic = true>
Kernel kernel_for(ReduceOp op) {
  if (op == ReduceOp::kMin) return run<T, Min>;
  if (op == ReduceOp::kMax) return run<T, Max>;
  if constexpr (arithmetic) {
    if (op == ReduceOp::kSum || op == ReduceOp::kAvg) return run<T, Sum>;
    if (op == ReduceOp::kProduct) return run<T, Product>;
  }
  if constexpr (std::is_integral_v<T>) {
    if (op == ReduceOp::kBor) return run<T, Or>;
    if (op == ReduceOp::kBand) return run<T, And>;
    if (op == ReduceOp::kBxor) return run<T, Xor>;
  }
  return nullptr;
}

// By DType.
constexpr Kernel (*kKernels[kDTypes])(ReduceOp) = {
    kernel_for<float>,   kernel_for<double>,  kernel_for<Half>,           kernel_for<BFloat16>, kernel_for<int32_t>,
    kernel_for<int64_t>, kernel_for<uint8_t>, kernel_for<uint8_t, false>, kernel_for<int8_t>,   kernel_for<int16_t>};

}  // namespace

void reduce(DType t, ReduceOp op, const void* const* src, int n, void* const* dst, int m, size_t count, int64_t divisor,
            bool nontemporal) {
  const Kernel kernel = kKernels[static_cast<size_t>(t)](op);
  if (kernel == nullptr || n < 1 || m < 1 || count == 0) return;
  kernel(src, n, dst, m, count, op == ReduceOp::kAvg ? divisor : 1, nontemporal);
  if (nontemporal) store_fence();
}

void copy_streaming(void* to, const void* from, size_t bytes) {
  char* out = static_cast<char*>(to);
  const char* in = static_cast<const char*>(from);
  const size_t head = std::min(bytes, (64 - reinterpret_cast<uintptr_t>(out) % 64) % 64);
  std::memcpy(out, in, head);
  size_t done = head;
  for (; bytes - done >= kGroupBytes; done += kGroupBytes) {
    Vector<uint8_t> group[kVectors];
    std::memcpy(group, in + done, kGroupBytes);
    store_vectors(group, kVectors, out + done, true);
  }
  std::memcpy(out + done, in + done, bytes - done);
  store_fence();
}

}  // namespace bagua
