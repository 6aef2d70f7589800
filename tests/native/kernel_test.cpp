// Every reduction against a reference in the widest type, over types, sizes, alignments and numbers of buffers.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "harness.h"
#include "kernel/half.h"
#include "kernel/reduce.h"

namespace bagua {
namespace {

constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kProduct, ReduceOp::kMin,  ReduceOp::kMax,
                             ReduceOp::kBor, ReduceOp::kBand,    ReduceOp::kBxor, ReduceOp::kAvg};

bool is_float(DType t) {
  return t == DType::kF32 || t == DType::kF64 || t == DType::kF16 || t == DType::kBF16;
}

float bfloat_to_float(uint16_t bits) {
  const uint32_t wide = uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

uint16_t float_to_bfloat(float value) {
  BFloat16 out;
  from_float(&value, &out, 1);
  return out.bits;
}

// Element i of a buffer as a number.
template <class T>
T read(const void* data, size_t i) {
  T value;
  std::memcpy(&value, static_cast<const char*>(data) + i * sizeof(T), sizeof(T));
  return value;
}

double read_float(DType t, const void* data, size_t i) {
  switch (t) {
    case DType::kF32:
      return read<float>(data, i);
    case DType::kF64:
      return read<double>(data, i);
    case DType::kF16:
      return half_to_float(read<uint16_t>(data, i));
    default:
      return bfloat_to_float(read<uint16_t>(data, i));
  }
}

int64_t read_integer(DType t, const void* data, size_t i) {
  switch (t) {
    case DType::kI32:
      return read<int32_t>(data, i);
    case DType::kI64:
      return read<int64_t>(data, i);
    case DType::kI8:
      return read<int8_t>(data, i);
    case DType::kI16:
      return read<int16_t>(data, i);
    default:
      return read<uint8_t>(data, i);
  }
}

// Wraps a value to the width of the type.
int64_t wrap(DType t, uint64_t value) {
  switch (t) {
    case DType::kI32:
      return static_cast<int32_t>(value);
    case DType::kI16:
      return static_cast<int16_t>(value);
    case DType::kI8:
      return static_cast<int8_t>(value);
    case DType::kI64:
      return static_cast<int64_t>(value);
    default:
      return static_cast<uint8_t>(value);
  }
}

// A buffer at an odd distance from a cache line, with guard bytes around it.
class Guarded {
 public:
  Guarded(size_t bytes, size_t shift) : bytes_(bytes), memory_(bytes + 2 * kGuard + 128, kFill) {
    const auto base = reinterpret_cast<uintptr_t>(memory_.data() + kGuard);
    start_ = kGuard + (64 - base % 64) % 64 + shift;
  }
  uint8_t* data() { return memory_.data() + start_; }
  bool guards_whole() const {
    for (size_t i = 0; i < kGuard; ++i) {
      if (memory_[start_ - 1 - i] != kFill || memory_[start_ + bytes_ + i] != kFill) return false;
    }
    return true;
  }

 private:
  static constexpr size_t kGuard = 64;
  static constexpr uint8_t kFill = 0xa5;
  size_t bytes_;
  std::vector<uint8_t> memory_;
  size_t start_ = 0;
};

void fill(DType t, void* data, size_t count, std::mt19937* random) {
  std::uniform_real_distribution<double> reals(-2, 2);
  for (size_t i = 0; i < count; ++i) {
    auto* at = static_cast<char*>(data) + i * dtype_size(t);
    const double value = reals(*random);
    const float single = static_cast<float>(value);
    const uint64_t bits = (uint64_t{(*random)()} << 32) | (*random)();
    uint16_t half = 0;
    if (t == DType::kF32) {
      std::memcpy(at, &single, 4);
    } else if (t == DType::kF64) {
      std::memcpy(at, &value, 8);
    } else if (t == DType::kF16 || t == DType::kBF16) {
      half = t == DType::kF16 ? float_to_half(single) : float_to_bfloat(single);
      std::memcpy(at, &half, 2);
    } else if (t == DType::kBool) {
      *at = static_cast<char>(bits & 1);
    } else {
      std::memcpy(at, &bits, dtype_size(t));
    }
  }
}

double reference_float(ReduceOp op, double a, double b) {
  if (op == ReduceOp::kProduct) return a * b;
  if (op == ReduceOp::kMin) return std::isnan(a) || a < b ? a : b;
  if (op == ReduceOp::kMax) return std::isnan(a) || a > b ? a : b;
  return a + b;
}

int64_t reference_integer(ReduceOp op, int64_t a, int64_t b) {
  switch (op) {
    case ReduceOp::kProduct:
      return static_cast<int64_t>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
    case ReduceOp::kMin:
      return std::min(a, b);
    case ReduceOp::kMax:
      return std::max(a, b);
    case ReduceOp::kBor:
      return a | b;
    case ReduceOp::kBand:
      return a & b;
    case ReduceOp::kBxor:
      return a ^ b;
    default:
      return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
  }
}

double tolerance(DType t) {
  if (t == DType::kF64) return 1e-14;
  if (t == DType::kF32) return 1e-5;
  return t == DType::kF16 ? 1.0 / 1024 : 1.0 / 128;
}

struct Case {
  DType type;
  ReduceOp op;
  int sources;
  int destinations;
  size_t count;
  size_t shift;  // elements
  bool in_place;
  bool nontemporal;
  int64_t divisor;
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << dtype_name(c.type) << ' ' << op_name(c.op) << " n=" << c.sources << " m=" << c.destinations
             << " count=" << c.count << " shift=" << c.shift << " in_place=" << c.in_place << " nt=" << c.nontemporal;
}

bool element_right(const Case& c, std::vector<std::vector<uint8_t>>& inputs, const void* result, size_t i) {
  if (is_float(c.type)) {
    double expected = read_float(c.type, inputs[0].data(), i);
    double scale = std::abs(expected);
    for (size_t k = 1; k < inputs.size(); ++k) {
      const double next = read_float(c.type, inputs[k].data(), i);
      expected = reference_float(c.op, expected, next);
      scale = std::max({scale, std::abs(expected), std::abs(next)});
    }
    if (c.op == ReduceOp::kAvg) expected /= static_cast<double>(c.divisor);
    return std::abs(read_float(c.type, result, i) - expected) <= tolerance(c.type) * (scale + 1e-3);
  }
  int64_t expected = read_integer(c.type, inputs[0].data(), i);
  for (size_t k = 1; k < inputs.size(); ++k) {
    expected = wrap(
        c.type, static_cast<uint64_t>(reference_integer(c.op, expected, read_integer(c.type, inputs[k].data(), i))));
  }
  if (c.op == ReduceOp::kAvg) expected /= c.divisor;
  return read_integer(c.type, result, i) == expected;
}

void check(const Case& c, std::mt19937* random) {
  const size_t bytes = c.count * dtype_size(c.type);
  std::vector<Guarded> buffers;
  std::vector<std::vector<uint8_t>> inputs;
  std::vector<const void*> sources;
  std::vector<void*> destinations;
  buffers.reserve(static_cast<size_t>(c.sources + c.destinations));
  for (int k = 0; k < c.sources; ++k) {
    const size_t shift = (c.shift + static_cast<size_t>(k) * (c.shift != 0)) * dtype_size(c.type);
    buffers.emplace_back(bytes, shift % 64);
    fill(c.type, buffers.back().data(), c.count, random);
    inputs.emplace_back(buffers.back().data(), buffers.back().data() + bytes);
    sources.push_back(buffers.back().data());
  }
  for (int j = 0; j < c.destinations; ++j) {
    if (c.in_place && j < c.sources) {
      destinations.push_back(buffers[static_cast<size_t>(c.sources - 1 - j)].data());
      continue;
    }
    buffers.emplace_back(bytes, (c.shift * static_cast<size_t>(j + 1) * dtype_size(c.type)) % 64);
    destinations.push_back(buffers.back().data());
  }
  reduce(c.type, c.op, sources.data(), c.sources, destinations.data(), c.destinations, c.count, c.divisor,
         c.nontemporal);
  bool right = true;
  for (size_t i = 0; i < c.count && right; ++i) right = element_right(c, inputs, destinations[0], i);
  for (const Guarded& buffer : buffers) right = right && buffer.guards_whole();
  for (const void* other : destinations) right = right && std::memcmp(destinations[0], other, bytes) == 0;
  if (!right) test::note_failure(__FILE__, __LINE__, test::show(c));
}

TEST(all_types_and_operations) {
  std::mt19937 random(1);
  for (int type = 0; type < kDTypes; ++type) {
    const auto t = static_cast<DType>(type);
    for (const ReduceOp op : kOps) {
      if (!op_supported(t, op)) continue;
      for (const int n : {1, 2, 3, 4, 5, 8}) {
        for (const size_t count : {size_t{1}, size_t{15}, size_t{64}, size_t{333}, size_t{5003}}) {
          const bool odd = count % 2 != 0;
          check({t, op, n, n % 3 + 1, count, odd ? size_t{1} : 0, count == 333, odd && n > 2, n}, &random);
        }
      }
    }
  }
}

TEST(alignments_and_destinations) {
  std::mt19937 random(2);
  for (const DType t : {DType::kF32, DType::kF16, DType::kBF16, DType::kU8, DType::kF64}) {
    for (size_t shift = 0; shift < 64 / dtype_size(t); shift += 3) {
      for (const int m : {1, 2, 4}) {
        for (const bool nontemporal : {false, true}) {
          check(
              {t, t == DType::kU8 ? ReduceOp::kMax : ReduceOp::kSum, 4, m, 4200 + shift, shift, m == 4, nontemporal, 1},
              &random);
        }
      }
    }
  }
}

// acc[i] = op(acc[i], in[i])
template <class T>
void accumulate(DType t, ReduceOp op, T* acc, const T* in, size_t count) {
  const void* const sources[] = {acc, in};
  void* const target = acc;
  reduce(t, op, sources, 2, &target, 1, count, 1, false);
}

TEST(the_grouping_does_not_change_the_bits) {
  // n sources at once, and one after the other, add in the same order.
  std::mt19937 random(3);
  constexpr size_t kCount = 1000;
  std::vector<std::vector<float>> in(7, std::vector<float>(kCount));
  std::vector<const void*> sources;
  for (auto& buffer : in) {
    fill(DType::kF32, buffer.data(), kCount, &random);
    sources.push_back(buffer.data());
  }
  std::vector<float> at_once(kCount);
  void* destination = at_once.data();
  reduce(DType::kF32, ReduceOp::kSum, sources.data(), 7, &destination, 1, kCount, 1, true);
  std::vector<float> one_by_one = in[0];
  for (size_t k = 1; k < 7; ++k) accumulate(DType::kF32, ReduceOp::kSum, one_by_one.data(), in[k].data(), kCount);
  EXPECT(at_once == one_by_one);
}

uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

TEST(half_conversions_exhaustive) {
  std::vector<Half> in(65536);
  std::vector<float> out(65536);
  std::vector<Half> back(65536);
  for (size_t i = 0; i < 65536; ++i) in[i].bits = static_cast<uint16_t>(i);
  to_float(in.data(), out.data(), in.size());
  from_float(out.data(), back.data(), in.size());
  for (size_t i = 0; i < 65536; ++i) {
    EXPECT_EQ(bits_of(out[i]), bits_of(half_to_float(in[i].bits)));
    const bool nan = (i & 0x7c00) == 0x7c00 && (i & 0x3ff) != 0;
    EXPECT_EQ(back[i].bits, nan ? in[i].bits | 0x200 : in[i].bits);
  }
}

TEST(half_rounding) {
  // Vector and scalar code agree on every exponent, at the halfway points and beside them.
  std::vector<float> in;
  for (uint32_t high = 0; high < 0x10000; high += 3) {
    for (const uint32_t low : {0u, 1u, 0x0fffu, 0x1000u, 0x1001u, 0x2fffu, 0x3000u, 0x3001u, 0x8000u, 0xffffu}) {
      const uint32_t bits = high << 16 | low;
      float value;
      std::memcpy(&value, &bits, 4);
      in.push_back(value);
    }
  }
  std::vector<Half> out(in.size());
  from_float(in.data(), out.data(), in.size());
  for (size_t i = 0; i < in.size(); ++i) EXPECT_EQ(out[i].bits, float_to_half(in[i]));
  EXPECT_EQ(float_to_half(1.0f + 0x1p-11f), 0x3c00);      // a tie goes to the even one
  EXPECT_EQ(float_to_half(1.0f + 3 * 0x1p-11f), 0x3c02);  // upward too
  EXPECT_EQ(float_to_half(65519.0f), 0x7bff);
  EXPECT_EQ(float_to_half(65520.0f), 0x7c00);
  EXPECT_EQ(float_to_half(0x1p-25f), 0x0000);
  EXPECT_EQ(float_to_half(0x1.8p-25f), 0x0001);
  EXPECT_EQ(float_to_half(-0x1p-24f), 0x8001);
}

TEST(bfloat_rounding) {
  EXPECT_EQ(float_to_bfloat(1.0f), 0x3f80);
  EXPECT_EQ(float_to_bfloat(1.0f + 0x1p-8f), 0x3f80);
  EXPECT_EQ(float_to_bfloat(1.0f + 3 * 0x1p-8f), 0x3f82);
  EXPECT_EQ(float_to_bfloat(std::numeric_limits<float>::max()), 0x7f80);
  EXPECT_EQ(float_to_bfloat(-std::numeric_limits<float>::infinity()), 0xff80);
  EXPECT_EQ(float_to_bfloat(0x1p-133f), 0x0001);  // subnormals are kept
  const uint32_t signalling = 0x7f800001;
  float nan;
  std::memcpy(&nan, &signalling, 4);
  EXPECT(std::isnan(bfloat_to_float(float_to_bfloat(nan))));
}

}  // namespace
}  // namespace bagua
