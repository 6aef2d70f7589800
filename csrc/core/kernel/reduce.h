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

size_t dtype_size(DType t);
const char* dtype_name(DType t);
const char* op_name(ReduceOp op);
// Bitwise operations need integers. bool reduces as uint8, with BOR, BAND, BXOR, MIN and MAX alone. int8 and int16
// support the same operations as int32.
bool op_supported(DType t, ReduceOp op);

// dst[j][i] = op over all k of src[k][i], for i in [0, count) and every j; n >= 1 sources, m >= 1 destinations. Buffers
// are aligned to the element only. A destination may be the same buffer as a source; no other overlap. f16 and bf16
// accumulate in f32 and round once, to nearest even. Only kAvg uses `divisor` (integers truncate toward zero). Partial
// sums for other hosts use kSum; finish() divides them at the end. `nontemporal`: use non-temporal stores, for large
// results. NaN propagates in MIN and MAX, as in torch.
void reduce(DType t, ReduceOp op, const void* const* src, int n, void* const* dst, int m, size_t count, int64_t divisor,
            bool nontemporal);

// acc[i] = op(acc[i], in[i])
void accumulate(DType t, ReduceOp op, void* acc, const void* in, size_t count);

// Divides `data` by `divisor` if `op` is kAvg; does nothing otherwise.
void finish(DType t, ReduceOp op, void* data, size_t count, int64_t divisor);

}  // namespace bagua
