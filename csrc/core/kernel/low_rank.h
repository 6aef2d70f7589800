// Kernels of PowerSGD: multiply a matrix by thin factors in few passes over the matrix.
#pragma once

#include <cstddef>

namespace bagua {

// The matrix is [rows, columns]. left is P transposed, [rank, rows]; right is Q transposed, [rank, columns]. All dense
// float32, aligned to the element, no overlap.
struct LowRank {
  size_t rows, columns, rank;
};

// memory += gradient - P Qᵀ, then projected = (memory Q)ᵀ, of shape [rank, rows]. `memory` is the error-feedback
// memory; P Qᵀ is the part of it that was sent in the last step. One pass subtracts that part and adds the next
// gradient, with three transfers per element: two reads and one write.
void low_rank_project(const LowRank& shape, float* memory, const float* gradient, const float* left, const float* right,
                      float* projected);

// right = (memoryᵀ P)ᵀ. Reads `memory` once.
void low_rank_back_project(const LowRank& shape, const float* memory, const float* left, float* right);

// result = P Qᵀ. Writes the result once; a large one with non-temporal stores.
void low_rank_product(const LowRank& shape, const float* left, const float* right, float* result);

}  // namespace bagua
