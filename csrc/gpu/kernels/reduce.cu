// bagua_kernels_reduce(), and its kernels for floating point.
#include "gpu/kernels/reduce.h"

namespace bagua::cuda {
namespace {

template <class T>
Run find_float(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
      return run<T, T, Sum>;
    case ReduceOp::kProduct:
      return run<T, T, Product>;
    case ReduceOp::kMin:
      return run<T, T, Min>;
    case ReduceOp::kMax:
      return run<T, T, Max>;
    default:
      return nullptr;
  }
}

// Returns nullptr if the combination is not supported.
Run find(DType dtype, ReduceOp op) {
  switch (dtype) {
    case DType::kF32:
      return find_float<float>(op);
    case DType::kF64:
      return find_float<double>(op);
    case DType::kF16:
      return find_float<Half>(op);
    case DType::kBF16:
      return find_float<BFloat16>(op);
    default:
      return find_integer_reduce(dtype, op);
  }
}

// Like Divider in kernel/reduce.cpp: if the divisor is a power of two it multiplies by the inverse: same bits.
void set_division(const BaguaReduce& from, Reduce& work) {
  const bool divides = from.op == static_cast<uint8_t>(ReduceOp::kAvg) && from.divisor > 1;
  const bool exact = (from.divisor & (from.divisor - 1)) == 0;
  work.divisor = from.divisor;
  work.division = !divides ? Division::kNone : exact ? Division::kMultiply : Division::kDivide;
  work.inverse = divides ? static_cast<int32_t>((int64_t{1} << 31) / from.divisor + 1) : 0;
  work.factor = exact && divides ? 1.0 / static_cast<double>(from.divisor) : static_cast<double>(from.divisor);
}

}  // namespace

cudaError_t load_reductions() {
  for (int dtype = 0; dtype < kDTypes; ++dtype) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kBor,
                              ReduceOp::kBand, ReduceOp::kBxor, ReduceOp::kAvg}) {
      Reduce nothing{};
      const Run run = find(static_cast<DType>(dtype), op);
      const cudaError_t error = run == nullptr ? cudaSuccess : run(nothing, {nullptr, true});
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

}  // namespace bagua::cuda

BAGUA_EXPORT int bagua_kernels_reduce(const BaguaReduce* from, void* on) {
  using namespace bagua::cuda;
  const Run run = find(static_cast<bagua::DType>(from->dtype), static_cast<bagua::ReduceOp>(from->op));
  if (run == nullptr || from->input_count < 1 || from->input_count > BAGUA_KERNELS_MOST_REDUCED) {
    return cudaErrorInvalidValue;
  }
  if (from->count == 0) return cudaSuccess;
  if (from->output == nullptr) return cudaErrorInvalidValue;
  Reduce work{};
  for (int k = 0; k < from->input_count; ++k) {
    if (from->inputs[k] == nullptr) return cudaErrorInvalidValue;
    work.inputs[k] = from->inputs[k];
  }
  work.output = from->output;
  work.count = from->count;
  work.input_count = from->input_count;
  set_division(*from, work);
  return run(work, {static_cast<cudaStream_t>(on)});
}
