// Helpers of the tests of codecs, on the CPU and on a device: memory whose ends are watched, numbers of every kind,
// ways of calling transcode().
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "codec/codec.h"
#include "harness.h"

namespace bagua::test {

inline const Encoding kEncodings[] = {{Codec::kNone, 0},   {Codec::kF16, 0},      {Codec::kBF16, 0},
                                      {Codec::kE4M3, 0},   {Codec::kE5M2, 0},     {Codec::kMinMax8, 0},
                                      {Codec::kInt4, 0},   {Codec::kSign1, 0},    {Codec::kTopK, 1},
                                      {Codec::kTopK, 700}, {Codec::kTopK, 65535}, {Codec::kInt2, 0}};

// Bytes whose end is the end of an allocation, `shift` bytes past a cache line; a pattern lies before them.
class Buffer {
 public:
  explicit Buffer(size_t bytes, size_t shift = 0) : bytes_(bytes), shift_(shift) {
    void* memory = nullptr;
    if (posix_memalign(&memory, 64, 64 + shift + bytes) != 0) throw std::bad_alloc();
    memory_ = static_cast<uint8_t*>(memory);
    std::memset(memory_, kFill, 64 + shift + bytes);
  }
  Buffer(const Buffer& other) : Buffer(other.bytes_, other.shift_) { std::memcpy(data(), other.data(), bytes_); }
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(memory_); }

  uint8_t* data() const { return memory_ + 64 + shift_; }
  float* floats() const { return reinterpret_cast<float*>(data()); }
  size_t bytes() const { return bytes_; }
  // Nothing was written before the data.
  bool whole() const {
    for (size_t i = 0; i < 64 + shift_; ++i) {
      if (memory_[i] != kFill) return false;
    }
    return true;
  }

 private:
  static constexpr uint8_t kFill = 0xa5;
  size_t bytes_;
  size_t shift_;
  uint8_t* memory_;
};

// Index of the first byte in which they differ; their size if they are the same. `any_nan`: they are floats, and one
// NaN is as good as another.
inline size_t first_difference(const Buffer& a, const Buffer& b, bool any_nan = false) {
  size_t i = 0;
  while (i < a.bytes()) {
    if (a.data()[i] == b.data()[i]) {
      ++i;
    } else if (any_nan && std::isnan(a.floats()[i / 4]) && std::isnan(b.floats()[i / 4])) {
      i = i / 4 * 4 + 4;
    } else {
      break;
    }
  }
  return i;
}

// How a vector's elements look.
enum class Kind { kUsual, kOdd, kEqual, kZero, kHuge, kTiny, kOffset };
constexpr Kind kKinds[] = {Kind::kUsual, Kind::kOdd,  Kind::kEqual, Kind::kZero,
                           Kind::kHuge,  Kind::kTiny, Kind::kOffset};

// kUsual: of very different sizes; kOdd: with infinities, NaN, denormals, zeros here and there; kEqual: few different
// ones; kHuge: up to the largest; kTiny: down to denormals; kOffset: far from 0, close to each other.
inline void fill(float* to, size_t count, uint32_t seed, Kind kind) {
  constexpr float kOddOnes[] = {INFINITY, -INFINITY, NAN,   -NAN,     0.0f,     -0.0f,
                                1e-42f,   -1e-38f,   3e38f, -3.4e38f, 65519.0f, 65520.0f};
  std::mt19937 random(seed);
  for (size_t i = 0; i < count; ++i) {
    const float unit = static_cast<float>(static_cast<int32_t>(random()) >> 8) * 0x1p-23f;
    const int exponent = static_cast<int>(random() % 12) - 6;
    to[i] = std::ldexp(unit, exponent);
    if (kind == Kind::kEqual) to[i] = static_cast<float>(static_cast<int>(random() % 5) - 2) * 0.25f;
    if (kind == Kind::kZero) to[i] = random() % 2 == 0 ? 0.0f : -0.0f;
    if (kind == Kind::kHuge) to[i] = std::ldexp(unit, 127 - static_cast<int>(random() % 3));
    if (kind == Kind::kTiny) to[i] = std::ldexp(unit, -115 - static_cast<int>(random() % 30));
    if (kind == Kind::kOffset) to[i] = 1e6f + unit;
  }
  if (kind != Kind::kOdd) return;
  for (size_t i = random() % 100; i < count; i += 1 + random() % 1500) to[i] = kOddOnes[random() % 12];
}

// One way of calling transcode().
struct Way {
  int raws;
  int encodeds;
  float scale;
  bool residual;
  bool message;
  int decodeds;
  bool in_place;  // the first output is the first raw source
  size_t shift;   // bytes by which float buffers miss a cache line
};

inline const Way kWays[] = {
    {1, 0, 1, false, true, 0, false, 0},      {1, 0, 1, false, true, 0, false, 4},
    {1, 0, 1, true, true, 0, false, 8},       {2, 0, 0.5f, false, true, 0, false, 4},
    {3, 0, 1, true, true, 2, true, 16},       {1, 1, 1, false, true, 1, false, 0},
    {1, 1, 1.0f / 3, true, true, 1, true, 4}, {0, 1, 1, false, false, 1, false, 32},
    {0, 1, 1, false, false, 3, false, 4},     {1, 1, 1, false, false, 1, true, 0},
    {4, 3, 1.0f / 7, true, true, 4, true, 4}, {0, 2, 1, false, false, 1, false, 16},
    {2, 2, 0.25f, false, false, 2, true, 60}, {0, 0, 1, true, true, 1, false, 0},
    {16, 0, 1, false, true, 1, false, 0},     {1, 15, 1.0f / 16, true, true, 1, true, 0},
};

// A message of these values.
inline Buffer encode(Encoding encoding, const Buffer& y) {
  Buffer message(encoded_bytes(encoding, y.bytes() / 4));
  Transcode work;
  work.encoding = encoding;
  work.count = y.bytes() / 4;
  work.raw = {y.floats()};
  work.message = message.data();
  transcode(work);
  EXPECT(message.whole());
  return message;
}

inline Buffer decode(Encoding encoding, const Buffer& message, size_t count) {
  Buffer decoded(count * 4);
  Transcode work;
  work.encoding = encoding;
  work.count = count;
  work.encoded = {message.data()};
  work.decoded = {decoded.floats()};
  transcode(work);
  EXPECT(decoded.whole());
  return decoded;
}

}  // namespace bagua::test
