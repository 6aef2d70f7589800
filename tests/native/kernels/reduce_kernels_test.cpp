// bagua_kernels_reduce() against the core's reduce(), bit for bit.
#include "kernel/reduce.h"
#include "rig.h"

namespace bagua {
namespace {

using test::Buffer;

constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kProduct, ReduceOp::kMin,  ReduceOp::kMax,
                             ReduceOp::kBor, ReduceOp::kBand,    ReduceOp::kBxor, ReduceOp::kAvg};

// Bits of numbers that are near 1 for the floats, so that products stay finite, some of them NaN and infinite.
void fill_elements(DType dtype, const Buffer& buffer, uint32_t seed) {
  std::mt19937 random(seed);
  const size_t size = dtype_size(dtype);
  for (size_t i = 0; i + size <= buffer.bytes(); i += size) {
    uint64_t bits = random() | uint64_t{random()} << 32;
    const bool odd = random() % 40 == 0;
    const uint64_t sign = bits & 1;
    if (dtype == DType::kF32) bits = odd ? bits : (sign << 31 | (0x3f000000u + (bits >> 8 & 0xffffffu)));
    if (dtype == DType::kF64) bits = odd ? bits : (sign << 63 | (0x3fe0000000000000u + (bits >> 12)));
    if (dtype == DType::kF16) bits = odd ? bits : (sign << 15 | (0x3800u + (bits >> 8 & 0x7ffu)));
    if (dtype == DType::kBF16) bits = odd ? bits : (sign << 15 | (0x3f00u + (bits >> 8 & 0xffu)));
    std::memcpy(buffer.data() + i, &bits, size);
  }
}

// The same, or with `any_nan` NaN both.
bool same_element(DType dtype, const uint8_t* a, const uint8_t* b, bool any_nan) {
  const size_t size = dtype_size(dtype);
  if (std::memcmp(a, b, size) == 0) return true;
  if (!any_nan) return false;
  uint64_t x = 0;
  uint64_t y = 0;
  std::memcpy(&x, a, size);
  std::memcpy(&y, b, size);
  const auto both_over = [&](uint64_t infinity, uint64_t magnitude) {
    return (x & magnitude) > infinity && (y & magnitude) > infinity;
  };
  if (dtype == DType::kF32) return both_over(0x7f800000u, 0x7fffffffu);
  if (dtype == DType::kF64) return both_over(0x7ff0000000000000u, 0x7fffffffffffffffu);
  if (dtype == DType::kF16) return both_over(0x7c00u, 0x7fffu);
  if (dtype == DType::kBF16) return both_over(0x7f80u, 0x7fffu);
  return false;
}

struct Case {
  DType dtype;
  ReduceOp op;
  size_t count;
  int inputs;
  int64_t divisor;
  size_t shift;        // elements by which all buffers miss a cache line
  size_t other_shift;  // and the second input besides
  int in_place;        // the output is this input; -1: another buffer
};

void compare(const Case& c) {
  const size_t size = dtype_size(c.dtype);
  std::vector<Buffer> inputs;
  std::vector<const void*> pointers;
  for (int k = 0; k < c.inputs; ++k) {
    inputs.emplace_back(c.count * size, (c.shift + (k == 1 ? c.other_shift : 0)) * size);
    fill_elements(c.dtype, inputs.back(), static_cast<uint32_t>(k + 1));
  }
  for (const Buffer& input : inputs) pointers.push_back(input.data());
  const Buffer expected(c.count * size);
  const Buffer found(c.count * size, c.shift * size);
  void* to = expected.data();
  reduce(c.dtype, c.op, pointers.data(), c.inputs, &to, 1, c.count, c.divisor, false);
  const Buffer& output = c.in_place < 0 ? found : inputs[static_cast<size_t>(c.in_place)];
  const BaguaReduce work{static_cast<uint8_t>(c.dtype),
                         static_cast<uint8_t>(c.op),
                         c.count,
                         pointers.data(),
                         c.inputs,
                         output.data(),
                         c.divisor};
  CHECK_EQ(bagua_kernels_reduce(&work, nullptr), 0);
  CHECK(output.whole());
  // The processor chooses the bits of a NaN that an operation made or passed on; for 16-bit floats a sum or product of
  // one input is an operation.
  const bool calculates = c.op == ReduceOp::kSum || c.op == ReduceOp::kProduct || c.op == ReduceOp::kAvg;
  const bool divides = c.op == ReduceOp::kAvg && c.divisor > 1;
  const bool sixteen = c.dtype == DType::kF16 || c.dtype == DType::kBF16;
  const bool any_nan = calculates && (c.inputs > 1 || divides || sixteen);
  for (size_t i = 0; i < c.count; ++i) {
    if (same_element(c.dtype, expected.data() + i * size, output.data() + i * size, any_nan)) continue;
    std::ostringstream text;
    text << dtype_name(c.dtype) << " " << op_name(c.op) << " count " << c.count << " inputs " << c.inputs << " divisor "
         << c.divisor << " shift " << c.shift << "+" << c.other_shift << ": element " << i;
    test::note_failure(__FILE__, __LINE__, text.str());
    throw test::Failed();
  }
}

TEST(every_type_and_operation) {
  for (int t = 0; t < kDTypes; ++t) {
    for (const ReduceOp op : kOps) {
      const auto dtype = static_cast<DType>(t);
      if (!op_supported(dtype, op)) {
        const BaguaReduce work{static_cast<uint8_t>(t), static_cast<uint8_t>(op), 1, nullptr, 1, nullptr, 1};
        EXPECT_EQ(bagua_kernels_reduce(&work, nullptr), 1);
        continue;
      }
      for (const int64_t divisor : {1, 3, 8}) {
        if (divisor != 3 && op != ReduceOp::kAvg) continue;
        compare({dtype, op, 777, 3, divisor, 0, 0, -1});
        compare({dtype, op, 1500, 2, divisor, 1, 0, 0});
        compare({dtype, op, 300, 2, divisor, 1, 1, -1});
        compare({dtype, op, 300, 1, divisor, 0, 0, -1});
      }
    }
  }
}

TEST(edges) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kU8, DType::kF64}) {
    const size_t most = 16 / dtype_size(dtype);
    for (size_t count = 1; count < 70; ++count) {
      const size_t shift = count % most;
      compare({dtype, ReduceOp::kMax, count, 2, 1, shift, 0, -1});
      compare({dtype, ReduceOp::kSum, count, 1, 1, shift, 0, 0});
      compare({dtype, ReduceOp::kSum, count, 5, 1, shift, 1, 2});
    }
  }
}

// More than the device has threads at once, and as many inputs as may be.
TEST(long_vectors) {
  compare({DType::kF32, ReduceOp::kSum, 100000, 2, 1, 3, 0, 1});
  compare({DType::kF32, ReduceOp::kAvg, 50000, 4, 7, 3, 1, -1});
  compare({DType::kF16, ReduceOp::kSum, 300000, 2, 1, 0, 0, -1});
  compare({DType::kBF16, ReduceOp::kSum, 1000, 64, 1, 0, 0, 63});
}

// Every float16 and bfloat16: a number comes through a sum, a product and a mean of one as it is, a NaN stays one; a
// minimum and a maximum keep a NaN's bits, but make it a quiet one.
TEST(every_half) {
  const Buffer input(65536 * 2);
  for (uint32_t h = 0; h < 65536; ++h) reinterpret_cast<uint16_t*>(input.data())[h] = static_cast<uint16_t>(h);
  const void* inputs[] = {input.data()};
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kProduct, ReduceOp::kAvg, ReduceOp::kMin, ReduceOp::kMax}) {
      const bool one_of_them = op == ReduceOp::kMin || op == ReduceOp::kMax;
      const Buffer output(65536 * 2);
      const Buffer expected(65536 * 2);
      void* to = expected.data();
      reduce(dtype, op, inputs, 1, &to, 1, 65536, 1, false);
      const BaguaReduce work{static_cast<uint8_t>(dtype), static_cast<uint8_t>(op), 65536, inputs, 1, output.data(), 1};
      CHECK_EQ(bagua_kernels_reduce(&work, nullptr), 0);
      for (size_t h = 0; h < 65536; ++h) {
        CHECK(same_element(dtype, expected.data() + 2 * h, output.data() + 2 * h, !one_of_them));
      }
    }
  }
}

// All integers of up to 16 bits, by divisors of all sizes: the kernels multiply instead.
TEST(every_small_mean) {
  const Buffer input(65536 * 2);
  for (uint32_t n = 0; n < 65536; ++n) reinterpret_cast<uint16_t*>(input.data())[n] = static_cast<uint16_t>(n);
  const void* inputs[] = {input.data()};
  std::vector<int64_t> divisors;
  for (int64_t d = 2; d < 600; d += d < 20 ? 1 : 7) divisors.push_back(d);
  for (int bits = 10; bits < 63; ++bits) {
    for (const int64_t more : {-1, 0, 1}) divisors.push_back((int64_t{1} << bits) + more);
  }
  for (const DType dtype : {DType::kI8, DType::kU8, DType::kI16}) {
    const size_t count = 65536 / (3 - dtype_size(dtype));  // 65536 elements of 16 bits, 32768 of 8
    const Buffer output(count * dtype_size(dtype));
    const Buffer expected(count * dtype_size(dtype));
    void* to = expected.data();
    for (const int64_t divisor : divisors) {
      reduce(dtype, ReduceOp::kAvg, inputs, 1, &to, 1, count, divisor, false);
      const auto type = static_cast<uint8_t>(dtype);
      const BaguaReduce work{type, static_cast<uint8_t>(ReduceOp::kAvg), count, inputs, 1, output.data(), divisor};
      CHECK_EQ(bagua_kernels_reduce(&work, nullptr), 0);
      if (test::first_difference(expected, output) == expected.bytes()) continue;
      EXPECT_EQ(divisor, int64_t{0});  // shows it
      return;
    }
  }
}

TEST(refused) {
  float value = 1;
  const void* inputs[] = {&value};
  BaguaReduce work{0, 0, 1, inputs, 1, &value, 1};
  EXPECT_EQ(bagua_kernels_reduce(&work, nullptr), 0);
  work.input_count = 0;
  EXPECT_EQ(bagua_kernels_reduce(&work, nullptr), 1);
  work.input_count = 65;
  EXPECT_EQ(bagua_kernels_reduce(&work, nullptr), 1);
  work.input_count = 1;
  work.output = nullptr;
  EXPECT_EQ(bagua_kernels_reduce(&work, nullptr), 1);
  work.count = 0;
  EXPECT_EQ(bagua_kernels_reduce(&work, nullptr), 0);
  EXPECT_EQ(bagua_kernels_version(), uint32_t{BAGUA_KERNELS_VERSION});
}

}  // namespace
}  // namespace bagua
