// Thin matrices against float64, in memory that ends with the last element.
#include "kernel/low_rank.h"

#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "harness.h"

namespace bagua {
namespace {

// Exactly so many elements, begun at an odd address: a sanitizer sees the first step beyond.
class Floats {
 public:
  Floats(size_t count, std::mt19937* random) : memory_(new float[count + 1]), count_(count) {
    std::normal_distribution<float> values;
    memory_[0] = 0;
    for (size_t i = 0; i < count; ++i) at()[i] = values(*random);
  }
  float* at() const { return memory_.get() + 1; }
  size_t count() const { return count_; }
  std::vector<double> wide() const { return {at(), at() + count_}; }

 private:
  std::unique_ptr<float[]> memory_;
  size_t count_;
};

void expect_close(const Floats& found, const std::vector<double>& wanted, size_t terms, const char* what) {
  for (size_t i = 0; i < wanted.size(); ++i) {
    const double bound = (static_cast<double>(terms) + 8) * 1e-6 * (1 + std::abs(wanted[i]));
    if (std::abs(found.at()[i] - wanted[i]) > bound) {
      test::note_failure(__FILE__, __LINE__, std::string(what) + " differs at " + std::to_string(i));
      return;
    }
  }
}

std::vector<double> product_of(const LowRank& shape, const std::vector<double>& left,
                               const std::vector<double>& right) {
  std::vector<double> product(shape.rows * shape.columns);
  for (size_t k = 0; k < shape.rank; ++k) {
    for (size_t i = 0; i < shape.rows; ++i) {
      for (size_t j = 0; j < shape.columns; ++j) {
        product[i * shape.columns + j] += left[k * shape.rows + i] * right[k * shape.columns + j];
      }
    }
  }
  return product;
}

void try_shape(const LowRank& shape, std::mt19937* random) {
  const size_t elements = shape.rows * shape.columns;
  const Floats memory(elements, random), gradient(elements, random), result(elements, random);
  const Floats left(shape.rank * shape.rows, random), right(shape.rank * shape.columns, random);
  const Floats projected(left.count(), random), back(right.count(), random);
  std::vector<double> matrix = memory.wide();
  const std::vector<double> added = gradient.wide(), product = product_of(shape, left.wide(), right.wide());
  for (size_t i = 0; i < elements; ++i) matrix[i] += added[i] - product[i];
  std::vector<double> p(left.count()), q(right.count());
  for (size_t k = 0; k < shape.rank; ++k) {
    for (size_t i = 0; i < shape.rows; ++i) {
      for (size_t j = 0; j < shape.columns; ++j) {
        p[k * shape.rows + i] += matrix[i * shape.columns + j] * right.at()[k * shape.columns + j];
        q[k * shape.columns + j] += matrix[i * shape.columns + j] * left.at()[k * shape.rows + i];
      }
    }
  }
  low_rank_project(shape, memory.at(), gradient.at(), left.at(), right.at(), projected.at());
  expect_close(memory, matrix, shape.rank, "memory");
  expect_close(projected, p, shape.columns, "projected");
  low_rank_back_project(shape, memory.at(), left.at(), back.at());
  expect_close(back, q, shape.rows, "right");
  low_rank_product(shape, left.at(), right.at(), result.at());
  expect_close(result, product, shape.rank, "result");
}

TEST(every_shape_around_the_widths_of_vectors) {
  std::mt19937 random(1);
  for (const size_t rows : {1, 2, 7, 8, 9, 17}) {
    for (const size_t columns : {1, 3, 15, 16, 17, 64, 79}) {
      for (const size_t rank : {1, 2, 3, 4, 5}) try_shape({rows, columns, rank}, &random);
    }
  }
}

TEST(rows_longer_than_a_piece) {
  std::mt19937 random(2);
  for (const size_t columns : {2047, 2048, 2049, 4100}) {
    for (const size_t rank : {1, 5}) try_shape({11, columns, rank}, &random);
  }
}

TEST(results_that_go_past_the_caches) {
  std::mt19937 random(3);
  try_shape({300, 901, 2}, &random);
}

TEST(nothing_to_do) {
  std::mt19937 random(4);
  try_shape({0, 5, 1}, &random);
  try_shape({5, 0, 1}, &random);
}

}  // namespace
}  // namespace bagua
