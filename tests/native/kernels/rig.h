// Helpers of the tests of the CUDA kernels: memory whose ends are watched, numbers of every kind, one call of both
// implementations.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "codec/codec.h"
#include "cuda_runtime.h"
#include "gpu/kernels/kernels.h"
#include "harness.h"

namespace bagua::test {

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

// All buffers of a call, filled: both implementations get the same.
struct Buffers {
  std::vector<Buffer> raws, messages, outputs;
  Buffer residual, message;

  Buffers(Encoding encoding, size_t count, const Way& way, Kind kind)
      : residual(way.residual ? count * 4 : 0, way.shift), message(encoded_bytes(encoding, count)) {
    for (int k = 0; k < way.raws; ++k) {
      raws.emplace_back(count * 4, way.shift);
      fill(raws.back().floats(), count, static_cast<uint32_t>(k + 1), kind);
    }
    for (int k = 0; k < way.encodeds; ++k) {
      Buffer y(count * 4);
      fill(y.floats(), count, static_cast<uint32_t>(k + 20), kind);
      messages.push_back(encode(encoding, y));
    }
    for (int j = 0; j < way.decodeds; ++j) outputs.emplace_back(count * 4, way.shift);
    if (way.residual) fill(residual.floats(), count, 40, Kind::kUsual);
  }

  static Buffer encode(Encoding encoding, const Buffer& y) {
    Buffer message(encoded_bytes(encoding, y.bytes() / 4));
    Transcode work;
    work.encoding = encoding;
    work.count = y.bytes() / 4;
    work.raw = {y.floats()};
    work.message = message.data();
    transcode(work);
    return message;
  }
};

// The call itself: by the core (on the CPU) or by the kernels.
inline void call(Encoding encoding, size_t count, const Way& way, const Buffers& buffers, bool kernels) {
  std::vector<const float*> raw;
  std::vector<const void*> encoded;
  std::vector<float*> decoded;
  for (const Buffer& b : buffers.raws) raw.push_back(b.floats());
  for (const Buffer& b : buffers.messages) encoded.push_back(b.data());
  for (const Buffer& b : buffers.outputs) decoded.push_back(b.floats());
  if (way.in_place) decoded[0] = buffers.raws[0].floats();
  float* residual = way.residual ? buffers.residual.floats() : nullptr;
  void* message = way.message ? buffers.message.data() : nullptr;
  if (kernels) {
    const BaguaTranscode work{static_cast<uint8_t>(encoding.codec),
                              encoding.density,
                              count,
                              raw.data(),
                              way.raws,
                              encoded.data(),
                              way.encodeds,
                              way.scale,
                              residual,
                              message,
                              decoded.data(),
                              way.decodeds};
    EXPECT_EQ(bagua_kernels_transcode(&work, nullptr), 0);
    return;
  }
  Transcode work;
  work.encoding = encoding;
  work.count = count;
  work.raw = raw;
  work.encoded = encoded;
  work.scale = way.scale;
  work.residual = residual;
  work.message = message;
  work.decoded = decoded;
  transcode(work);
}

// Decodes a message by the core.
inline Buffer decode(Encoding encoding, const Buffer& message, size_t count) {
  Buffer decoded(count * 4);
  Transcode work;
  work.encoding = encoding;
  work.count = count;
  work.encoded = {message.data()};
  work.decoded = {decoded.floats()};
  transcode(work);
  return decoded;
}

inline bool has_nan(const Buffer& buffer) {
  return std::any_of(buffer.floats(), buffer.floats() + buffer.bytes() / 4, [](float v) { return std::isnan(v); });
}

// All buffers after both implementations, byte for byte. Only where an operation made a NaN or passed it on may it be
// another: in y if that is calculated, in what is decoded if decoding is a product.
inline void compare(Encoding encoding, size_t count, const Way& way, Kind kind) {
  const Buffers expected(encoding, count, way, kind);
  const Buffers found(expected);
  call(encoding, count, way, expected, false);
  call(encoding, count, way, found, true);
  const auto same = [&](const Buffer& a, const Buffer& b, const char* what, bool any_nan = false) {
    const size_t at = first_difference(a, b, any_nan);
    if (at == a.bytes() && b.whole()) return;
    std::ostringstream text;
    text << codec_name(encoding.codec) << " density " << encoding.density << " count " << count << " raws " << way.raws
         << " encodeds " << way.encodeds << " scale " << way.scale << " residual " << way.residual << " message "
         << way.message << " decodeds " << way.decodeds << " in place " << way.in_place << " shift " << way.shift
         << " kind " << static_cast<int>(kind) << ": " << what << " differs at byte " << at << " of " << a.bytes();
    note_failure(__FILE__, __LINE__, text.str());
    throw Failed();
  };
  const Codec codec = encoding.codec;
  const bool products =
      codec == Codec::kE4M3 || codec == Codec::kE5M2 || codec == Codec::kMinMax8 || codec == Codec::kInt4;
  const bool calculated =
      way.raws + way.encodeds > 1 || way.scale != 1 || way.residual || (way.encodeds == 1 && products);
  const bool any_nan = calculated || (way.message && products);
  for (size_t k = 0; k < expected.raws.size(); ++k) {
    same(expected.raws[k], found.raws[k], "raw", k == 0 && way.in_place && any_nan);
  }
  for (size_t k = 0; k < expected.messages.size(); ++k) same(expected.messages[k], found.messages[k], "encoded");
  for (size_t k = 0; k < expected.outputs.size(); ++k) same(expected.outputs[k], found.outputs[k], "decoded", any_nan);
  same(expected.residual, found.residual, "residual");
  const Buffer means = decode(encoding, expected.message, count);
  if (calculated && has_nan(means)) {
    same(means, decode(encoding, found.message, count), "what the message says", true);
  } else {
    same(expected.message, found.message, "message");
  }
}

}  // namespace bagua::test
