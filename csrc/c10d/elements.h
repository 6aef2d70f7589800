// Element types and reductions of torch in those of the core.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "kernel/reduce.h"

namespace bagua::dist {

// An element of torch as `per` elements of the core: 2 for complex numbers.
struct Element {
  DType dtype = DType::kU8;
  uint64_t per = 1;
};

struct Reduction {
  Element element;
  ReduceOp op = ReduceOp::kSum;
};

// Returns the core's element for an operation that moves data: a type that the core lacks is moved as bytes.
Element element_of(at::ScalarType type);
// Returns the core's reduction. Raises ValueError, which begins with `title`, where this type can't be reduced so. For
// bool SUM is "or" and PRODUCT is "and"; complex numbers have SUM and AVG alone.
Reduction reduction_of(at::ScalarType type, const ::c10d::ReduceOp& op, const char* title);
// Raises ValueError unless both have one dtype.
void check_alike(const char* title, const at::Tensor& one, const at::Tensor& other);

}  // namespace bagua::dist
