// Element types and reductions, and vectorised kernels that make one pass over memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace bagua {

// Part of the shared-memory layout and of the wire format: never renumber.
enum class DType : uint8_t {
  kF32 = 0,
  kF64 = 1,
  kF16 = 2,
  kBF16 = 3,
  kI32 = 4,
  kI64 = 5,
  kU8 = 6,
  // The following are moved and compared bit for bit, but not reduced.
  kBool = 7,
  kI8 = 8,
  kI16 = 9,
};
constexpr int kDTypes = 10;

// The same numbers as bagua.torch_api.ReduceOp.
enum class ReduceOp : uint8_t { kSum = 0, kProduct = 1, kMin = 2, kMax = 3, kBor = 7, kBand = 8, kBxor = 9, kAvg = 10 };

constexpr size_t dtype_size(DType t) {
  constexpr size_t kBytes[kDTypes] = {4, 8, 2, 2, 4, 8, 1, 1, 1, 2};
  return kBytes[static_cast<int>(t)];
}
inline const char* dtype_name(DType t) {
  constexpr const char* kNames[kDTypes] = {"float32", "float64", "float16", "bfloat16", "int32",
                                           "int64",   "uint8",   "bool",    "int8",     "int16"};
  const auto index = static_cast<size_t>(t);
  return index < kDTypes ? kNames[index] : "unknown";
}
inline const char* op_name(ReduceOp op) {
  constexpr const char* kNames[] = {"SUM", "PRODUCT", "MIN", "MAX", "", "", "", "BOR", "BAND", "BXOR", "AVG"};
  const auto index = static_cast<size_t>(op);
  return index < sizeof(kNames) / sizeof(*kNames) && *kNames[index] != '\0' ? kNames[index] : "unknown";
}
// Bitwise operations need integers. bool reduces as uint8, with BOR, BAND, BXOR, MIN and MAX alone. int8 and int16
// support the same operations as int32.
constexpr bool op_supported(DType t, ReduceOp op) {
  if (static_cast<int>(t) >= kDTypes) return false;
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kProduct:
    case ReduceOp::kAvg:
      return t != DType::kBool;
    case ReduceOp::kMin:
    case ReduceOp::kMax:
      return true;
    case ReduceOp::kBor:
    case ReduceOp::kBand:
    case ReduceOp::kBxor:
      return t > DType::kBF16;
  }
  return false;
}

// dst[j][i] = op over all k of src[k][i], for i in [0, count) and every j; n >= 1 sources, m >= 1 destinations. Buffers
// are aligned to the element only. A destination may be the same buffer as a source; no other overlap. f16 and bf16
// accumulate in f32 and round once, to nearest even. Only kAvg uses `divisor` (integers truncate toward zero); partial
// sums for other hosts use kSum. `nontemporal`: use non-temporal stores, for large results. NaN propagates in MIN and
// MAX, as in torch.
void reduce(DType t, ReduceOp op, const void* const* src, int n, void* const* dst, int m, size_t count, int64_t divisor,
            bool nontemporal);

// memcpy() with non-temporal stores, for results that nobody reads soon: they do not fill the caches, and the processor
// need not read a cache line before it is written. The two must not overlap.
void copy_streaming(void* to, const void* from, size_t bytes);

}  // namespace bagua
