#include "kernel/low_rank.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernel/lanes.h"

namespace bagua {
namespace {

using V = Vector<float>;
constexpr size_t kLanes = kVectorBytes / sizeof(float);

// Elements of a row that are handled at once: they stay in the first-level cache for all columns of a thin matrix.
constexpr size_t kTile = 2048;
constexpr size_t kRowsAtOnce = 8;
constexpr size_t kResultPastCaches = size_t{1}
                                     << 20;  // bytes; a smaller result is read again before it leaves the caches

V load(const float* from) {
  V value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

void store(const V& value, float* to) {
  std::memcpy(to, &value, sizeof value);
}

float sum(const V& lanes) {
  float total = 0;
  for (size_t lane = 0; lane < kLanes; ++lane) total += lanes[lane];
  return total;
}

// One piece of a row: memory += gradient - sum over k of left[k * stride] * right[k * columns], and then
// projected[k * stride] += memory . right[k * columns], both while the piece is in registers.
template <size_t rank>
void project_narrow(float* memory, const float* gradient, const float* left, size_t stride, const float* right,
                    size_t columns, size_t count, float* projected) {
  V sums[rank] = {};
  float rests[rank] = {};
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    V value = load(memory + i) + load(gradient + i);
    V factors[rank];
    for (size_t k = 0; k < rank; ++k) {
      factors[k] = load(right + k * columns + i);
      value -= left[k * stride] * factors[k];
    }
    store(value, memory + i);
    for (size_t k = 0; k < rank; ++k) sums[k] += value * factors[k];
  }
  for (; i < count; ++i) {
    float value = memory[i] + gradient[i];
    for (size_t k = 0; k < rank; ++k) value -= left[k * stride] * right[k * columns + i];
    memory[i] = value;
    for (size_t k = 0; k < rank; ++k) rests[k] += value * right[k * columns + i];
  }
  for (size_t k = 0; k < rank; ++k) projected[k * stride] += sum(sums[k]) + rests[k];
}

float dot(const float* a, const float* b, size_t count) {
  V sums[4] = {};
  size_t i = 0;
  for (; i + 4 * kLanes <= count; i += 4 * kLanes) {
    for (size_t q = 0; q < 4; ++q) sums[q] += load(a + i + q * kLanes) * load(b + i + q * kLanes);
  }
  for (; i + kLanes <= count; i += kLanes) sums[0] += load(a + i) * load(b + i);
  float total = sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; i < count; ++i) total += a[i] * b[i];
  return total;
}

// The same for any rank: the piece stays in the first-level cache between the two steps.
void project_wide(float* memory, const float* gradient, const float* left, size_t stride, const float* right,
                  size_t columns, size_t count, size_t rank, float* projected) {
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    V value = load(memory + i) + load(gradient + i);
    for (size_t k = 0; k < rank; ++k) value -= left[k * stride] * load(right + k * columns + i);
    store(value, memory + i);
  }
  for (; i < count; ++i) {
    float value = memory[i] + gradient[i];
    for (size_t k = 0; k < rank; ++k) value -= left[k * stride] * right[k * columns + i];
    memory[i] = value;
  }
  for (size_t k = 0; k < rank; ++k) projected[k * stride] += dot(memory, right + k * columns, count);
}

void project_piece(float* memory, const float* gradient, const float* left, size_t stride, const float* right,
                   size_t columns, size_t count, size_t rank, float* projected) {
  switch (rank) {
    case 1:
      return project_narrow<1>(memory, gradient, left, stride, right, columns, count, projected);
    case 2:
      return project_narrow<2>(memory, gradient, left, stride, right, columns, count, projected);
    case 3:
      return project_narrow<3>(memory, gradient, left, stride, right, columns, count, projected);
    case 4:
      return project_narrow<4>(memory, gradient, left, stride, right, columns, count, projected);
    default:
      return project_wide(memory, gradient, left, stride, right, columns, count, rank, projected);
  }
}

// out += sum over `rows` rows of the memory, each times its factor
template <size_t rows>
void add_rows(const float* memory, size_t columns, const float* factors, float* out) {
  size_t j = 0;
  for (; j + kLanes <= columns; j += kLanes) {
    V total = load(out + j);
    for (size_t row = 0; row < rows; ++row) total += factors[row] * load(memory + row * columns + j);
    store(total, out + j);
  }
  for (; j < columns; ++j) {
    for (size_t row = 0; row < rows; ++row) out[j] += factors[row] * memory[row * columns + j];
  }
}

// One row of the product.
void product_row(const LowRank& shape, const float* left, const float* right, float* to, bool past_caches) {
  const size_t misplaced = reinterpret_cast<uintptr_t>(to) % kVectorBytes / sizeof(float);
  const size_t head = past_caches && misplaced != 0 ? std::min(shape.columns, kLanes - misplaced) : 0;
  const auto one = [&](size_t j) {
    float value = left[0] * right[j];
    for (size_t k = 1; k < shape.rank; ++k) value += left[k * shape.rows] * right[k * shape.columns + j];
    to[j] = value;
  };
  size_t j = 0;
  for (; j < head; ++j) one(j);
  for (; j + kLanes <= shape.columns; j += kLanes) {
    V value = left[0] * load(right + j);
    for (size_t k = 1; k < shape.rank; ++k) value += left[k * shape.rows] * load(right + k * shape.columns + j);
    store_vectors(&value, 1, to + j, past_caches);
  }
  for (; j < shape.columns; ++j) one(j);
}

}  // namespace

void low_rank_project(const LowRank& shape, float* memory, const float* gradient, const float* left, const float* right,
                      float* projected) {
  for (size_t row = 0; row < shape.rows; ++row) {
    for (size_t k = 0; k < shape.rank; ++k) projected[k * shape.rows + row] = 0;
    for (size_t at = 0; at < shape.columns; at += kTile) {
      const size_t place = row * shape.columns + at;
      project_piece(memory + place, gradient + place, left + row, shape.rows, right + at, shape.columns,
                    std::min(kTile, shape.columns - at), shape.rank, projected + row);
    }
  }
}

void low_rank_back_project(const LowRank& shape, const float* memory, const float* left, float* right) {
  std::fill_n(right, shape.rank * shape.columns, 0.0f);
  for (size_t row = 0; row < shape.rows;) {
    const float* rows = memory + row * shape.columns;
    const bool whole = shape.rows - row >= kRowsAtOnce;
    for (size_t k = 0; k < shape.rank; ++k) {
      const float* factors = left + k * shape.rows + row;
      float* out = right + k * shape.columns;
      if (whole) {
        add_rows<kRowsAtOnce>(rows, shape.columns, factors, out);
      } else {
        add_rows<1>(rows, shape.columns, factors, out);
      }
    }
    row += whole ? kRowsAtOnce : 1;
  }
}

void low_rank_product(const LowRank& shape, const float* left, const float* right, float* result) {
  const bool past_caches = shape.rows * shape.columns * sizeof(float) >= kResultPastCaches;
  for (size_t row = 0; row < shape.rows; ++row) {
    product_row(shape, left + row, right, result + row * shape.columns, past_caches);
  }
  if (past_caches) store_fence();
}

}  // namespace bagua
