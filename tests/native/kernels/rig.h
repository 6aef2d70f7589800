// One call of both implementations: by the core on the CPU, and by the CUDA kernels.
#pragma once

#include "codec_rig.h"
#include "cuda_runtime.h"
#include "gpu/kernels/kernels.h"

namespace bagua::test {

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
