// Reductions of integers and of bool.
#include "gpu/kernels/reduce.h"

namespace bagua::cuda {
namespace {

template <class S>
Run find_bits(ReduceOp op) {
  using U = std::make_unsigned_t<S>;
  switch (op) {
    case ReduceOp::kMin:
      return run<S, S, Min>;
    case ReduceOp::kMax:
      return run<S, S, Max>;
    case ReduceOp::kBor:
      return run<U, U, Or>;
    case ReduceOp::kBand:
      return run<U, U, And>;
    case ReduceOp::kBxor:
      return run<U, U, Xor>;
    default:
      return nullptr;
  }
}

template <class S>
Run find_integer(ReduceOp op) {
  using U = std::make_unsigned_t<S>;
  if (op == ReduceOp::kSum || op == ReduceOp::kAvg) return run<S, U, Sum>;
  if (op == ReduceOp::kProduct) return run<U, U, Product>;
  return find_bits<S>(op);
}

}  // namespace

Run find_integer_reduce(DType dtype, ReduceOp op) {
  switch (dtype) {
    case DType::kI32:
      return find_integer<int32_t>(op);
    case DType::kI64:
      return find_integer<int64_t>(op);
    case DType::kU8:
      return find_integer<uint8_t>(op);
    case DType::kBool:
      return find_bits<uint8_t>(op);
    case DType::kI8:
      return find_integer<int8_t>(op);
    case DType::kI16:
      return find_integer<int16_t>(op);
    default:
      return nullptr;
  }
}

}  // namespace bagua::cuda
