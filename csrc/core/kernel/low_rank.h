// Kernels of PowerSGD: multiply a matrix with thin factors, in as few passes over the matrix as possible.
#pragma once

#include <cstddef>

namespace bagua {

// The matrix is [rows, columns]. left is P transposed, [rank, rows]; right is Q transposed, [rank, columns]. All dense
// float32, aligned to the element, no overlap.
struct LowRank {
  size_t rows, columns, rank;
};

// memory += gradient - P Qᵀ, and then projected = (memory Q)ᵀ, [rank, rows]: what `left` and `right` have sent of the
// memory leaves it in the pass that brings the next gradient, so that it costs none of its own. Three transfers per
// element: read both, write the memory.
void low_rank_project(const LowRank& shape, float* memory, const float* gradient, const float* left, const float* right,
                      float* projected);

// right = (memoryᵀ P)ᵀ. Reads the memory once.
void low_rank_back_project(const LowRank& shape, const float* memory, const float* left, float* right);

// result = P Qᵀ. Writes the result once, past the caches where it is large.
void low_rank_product(const LowRank& shape, const float* left, const float* right, float* result);

}  // namespace bagua
