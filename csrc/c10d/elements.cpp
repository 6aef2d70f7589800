#include "c10d/elements.h"

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

namespace bagua::dist {

namespace {

bool known(at::ScalarType type, Element* element) {
  switch (type) {
    case at::kFloat:
      *element = {DType::kF32, 1};
      return true;
    case at::kDouble:
      *element = {DType::kF64, 1};
      return true;
    case at::kHalf:
      *element = {DType::kF16, 1};
      return true;
    case at::kBFloat16:
      *element = {DType::kBF16, 1};
      return true;
    case at::kInt:
      *element = {DType::kI32, 1};
      return true;
    case at::kLong:
      *element = {DType::kI64, 1};
      return true;
    case at::kByte:
      *element = {DType::kU8, 1};
      return true;
    case at::kBool:
      *element = {DType::kBool, 1};
      return true;
    case at::kChar:
      *element = {DType::kI8, 1};
      return true;
    case at::kShort:
      *element = {DType::kI16, 1};
      return true;
    case at::kComplexHalf:
      *element = {DType::kF16, 2};
      return true;
    case at::kComplexFloat:
      *element = {DType::kF32, 2};
      return true;
    case at::kComplexDouble:
      *element = {DType::kF64, 2};
      return true;
    default:
      return false;
  }
}

const char* name_of(::c10d::ReduceOp::RedOpType op) {
  switch (op) {
    case ::c10d::ReduceOp::SUM:
      return "SUM";
    case ::c10d::ReduceOp::AVG:
      return "AVG";
    case ::c10d::ReduceOp::PRODUCT:
      return "PRODUCT";
    case ::c10d::ReduceOp::MIN:
      return "MIN";
    case ::c10d::ReduceOp::MAX:
      return "MAX";
    case ::c10d::ReduceOp::BAND:
      return "BAND";
    case ::c10d::ReduceOp::BOR:
      return "BOR";
    case ::c10d::ReduceOp::BXOR:
      return "BXOR";
    case ::c10d::ReduceOp::PREMUL_SUM:
      return "PREMUL_SUM";
    default:
      return "an unknown reduction";
  }
}

bool core_op(::c10d::ReduceOp::RedOpType op, bool boolean, ReduceOp* out) {
  switch (op) {
    case ::c10d::ReduceOp::SUM:
      *out = boolean ? ReduceOp::kBor : ReduceOp::kSum;
      return true;
    case ::c10d::ReduceOp::AVG:
      *out = ReduceOp::kAvg;
      return true;
    case ::c10d::ReduceOp::PRODUCT:
      *out = boolean ? ReduceOp::kBand : ReduceOp::kProduct;
      return true;
    case ::c10d::ReduceOp::MIN:
      *out = ReduceOp::kMin;
      return true;
    case ::c10d::ReduceOp::MAX:
      *out = ReduceOp::kMax;
      return true;
    case ::c10d::ReduceOp::BAND:
      *out = ReduceOp::kBand;
      return true;
    case ::c10d::ReduceOp::BOR:
      *out = ReduceOp::kBor;
      return true;
    case ::c10d::ReduceOp::BXOR:
      *out = ReduceOp::kBxor;
      return true;
    default:
      return false;
  }
}

// The core answers the same; but there an operation that can't be ends the job.
bool supported(DType dtype, ReduceOp op) {
  const bool bitwise = op == ReduceOp::kBand || op == ReduceOp::kBor || op == ReduceOp::kBxor;
  if (dtype == DType::kBool) return bitwise || op == ReduceOp::kMin || op == ReduceOp::kMax;
  const bool floating = dtype == DType::kF32 || dtype == DType::kF64 || dtype == DType::kF16 || dtype == DType::kBF16;
  return !(floating && bitwise);
}

}  // namespace

Element element_of(at::ScalarType type) {
  Element element;
  return known(type, &element) ? element : Element{DType::kU8, c10::elementSize(type)};
}

Reduction reduction_of(at::ScalarType type, const ::c10d::ReduceOp& op, const char* title) {
  Reduction reduction;
  const auto kind = static_cast<::c10d::ReduceOp::RedOpType>(op);
  TORCH_CHECK_VALUE(known(type, &reduction.element), title, ": ", type,
                    " tensors can't be reduced. Supported: float, double, half, bfloat16, int8 to int64, uint8, bool, "
                    "complex. [BG405]");
  const bool done = core_op(kind, type == at::kBool, &reduction.op) && supported(reduction.element.dtype, reduction.op);
  const bool linear = reduction.op == ReduceOp::kSum || reduction.op == ReduceOp::kAvg;
  TORCH_CHECK_VALUE(done && (reduction.element.per == 1 || linear), title, ": ", type,
                    " tensors can't be reduced with ", name_of(kind), ". [BG405]");
  return reduction;
}

}  // namespace bagua::dist
