#include "c10d/elements.h"

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>
#include <utility>

namespace bagua::dist {

namespace {

using Theirs = ::c10d::ReduceOp;

// nullptr: the core has no such type.
const Element* find(at::ScalarType type) {
  static constexpr std::pair<at::ScalarType, Element> kElements[] = {
      {at::kFloat, {DType::kF32, 1}},         {at::kDouble, {DType::kF64, 1}},
      {at::kHalf, {DType::kF16, 1}},          {at::kBFloat16, {DType::kBF16, 1}},
      {at::kInt, {DType::kI32, 1}},           {at::kLong, {DType::kI64, 1}},
      {at::kByte, {DType::kU8, 1}},           {at::kBool, {DType::kBool, 1}},
      {at::kChar, {DType::kI8, 1}},           {at::kShort, {DType::kI16, 1}},
      {at::kComplexHalf, {DType::kF16, 2}},   {at::kComplexFloat, {DType::kF32, 2}},
      {at::kComplexDouble, {DType::kF64, 2}},
  };
  for (const auto& [theirs, ours] : kElements) {
    if (theirs == type) return &ours;
  }
  return nullptr;
}

struct Op {
  Theirs::RedOpType theirs;
  ReduceOp ours, of_bool;
};
constexpr Op kOps[] = {
    {Theirs::SUM, ReduceOp::kSum, ReduceOp::kBor},          {Theirs::AVG, ReduceOp::kAvg, ReduceOp::kAvg},
    {Theirs::PRODUCT, ReduceOp::kProduct, ReduceOp::kBand}, {Theirs::MIN, ReduceOp::kMin, ReduceOp::kMin},
    {Theirs::MAX, ReduceOp::kMax, ReduceOp::kMax},          {Theirs::BAND, ReduceOp::kBand, ReduceOp::kBand},
    {Theirs::BOR, ReduceOp::kBor, ReduceOp::kBor},          {Theirs::BXOR, ReduceOp::kBxor, ReduceOp::kBxor},
};

}  // namespace

Element element_of(at::ScalarType type) {
  const Element* const found = find(type);
  return found != nullptr ? *found : Element{DType::kU8, c10::elementSize(type)};
}

Reduction reduction_of(at::ScalarType type, const ::c10d::ReduceOp& op, const char* title) {
  const Element* const element = find(type);
  TORCH_CHECK_VALUE(element != nullptr, title, ": ", type,
                    " tensors can't be reduced. Supported: float, double, half, bfloat16, int8 to int64, uint8, bool, "
                    "complex. [BG405]");
  const auto theirs = static_cast<Theirs::RedOpType>(op);
  const Op* const found =
      std::find_if(std::begin(kOps), std::end(kOps), [theirs](const Op& one) { return one.theirs == theirs; });
  const bool known = found != std::end(kOps);
  const ReduceOp ours = !known ? ReduceOp::kSum : type == at::kBool ? found->of_bool : found->ours;
  // The core answers the same; but there an operation that can't be ends the job.
  const bool linear = ours == ReduceOp::kSum || ours == ReduceOp::kAvg;
  TORCH_CHECK_VALUE(known && op_supported(element->dtype, ours) && (element->per == 1 || linear), title, ": ", type,
                    " tensors can't be reduced with ",
                    known                          ? op_name(found->ours)
                    : theirs == Theirs::PREMUL_SUM ? "PREMUL_SUM"
                                                   : "an unknown reduction",
                    ". [BG405]");
  return {*element, ours};
}

void check_alike(const char* title, const at::Tensor& one, const at::Tensor& other) {
  TORCH_CHECK_VALUE(one.scalar_type() == other.scalar_type(), title, ": tensors of ", one.scalar_type(), " and of ",
                    other.scalar_type(), " are mixed. All must be of one dtype. [BG402]");
}

}  // namespace bagua::dist
