// Element types and reductions of torch in those of the core.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "kernel/reduce.h"

namespace bagua::dist {

// One element of torch is `per` elements of the core.
struct Element {
  DType dtype = DType::kU8;
  uint64_t per = 1;
};

struct Reduction {
  Element element;
  ReduceOp op = ReduceOp::kSum;
};

// For operations that move data: every type, those that the core does not know as bytes.
Element element_of(at::ScalarType type);
// Raises ValueError where this type can't be reduced so. bool adds as "or" and multiplies as "and"; complex numbers are
// added and averaged.
Reduction reduction_of(at::ScalarType type, const ::c10d::ReduceOp& op, const char* title);

}  // namespace bagua::dist
