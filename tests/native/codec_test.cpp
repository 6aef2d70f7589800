// The codecs: every way of calling transcode() against its definition, element by element; the bits of the formats; and
// that nothing outside the buffers is touched (their ends are the ends of allocations, which ASan watches).
#include "base/crc32c.h"
#include "codec_rig.h"

namespace bagua {
namespace {

using test::Buffer;
using test::decode;
using test::encode;
using test::kEncodings;
using test::kWays;
using test::Way;

const size_t kCounts[] = {0, 1, 2, 7, 9, 64, 65, 127, 129, 513, 1023, 1024, 1025, 1151, 2048, 5001, 16385};

void fill(float* to, size_t count, uint32_t seed) {
  test::fill(to, count, seed, test::Kind::kUsual);
}

// Infinities, NaN, denormals, both zeros and large numbers, here and there.
void sprinkle(float* to, size_t count, uint32_t seed) {
  constexpr float kOdd[] = {INFINITY, -INFINITY, NAN,      0.0f,     -0.0f,   1e-42f,
                            -1e-38f,  3e38f,     -3.4e38f, 65519.0f, 65520.0f};
  std::mt19937 random(seed);
  for (size_t i = random() % 100; i < count; i += random() % 3000) to[i] = kOdd[random() % 11];
}

bool same_bits(float a, float b) {
  return std::memcmp(&a, &b, 4) == 0 || (std::isnan(a) && std::isnan(b));
}

// Everything that one call of transcode() should write, by the definition in codec.h.
void check_way(Encoding encoding, size_t count, const Way& way) {
  const size_t bytes = count * 4;
  std::vector<Buffer> raws, messages, contents, outputs;
  raws.reserve(8);
  for (int k = 0; k < way.raws; ++k) {
    raws.emplace_back(bytes, way.shift);
    fill(raws.back().floats(), count, static_cast<uint32_t>(k + 1));
    if (k == 0) sprinkle(raws.back().floats(), count, 9);
  }
  for (int k = 0; k < way.encodeds; ++k) {
    Buffer y(bytes);
    fill(y.floats(), count, static_cast<uint32_t>(k + 20));
    messages.push_back(encode(encoding, y));
    contents.push_back(decode(encoding, messages.back(), count));
  }
  Buffer residual(bytes, way.shift), message(encoded_bytes(encoding, count));
  fill(residual.floats(), count, 40);
  for (int j = 0; j < way.decodeds; ++j) outputs.emplace_back(bytes, way.shift);

  Buffer y(bytes);
  for (size_t i = 0; i < count; ++i) {
    volatile float sum = way.raws > 0 ? raws[0].floats()[i] : 0.0f;  // volatile: every step is rounded
    for (int k = 1; k < way.raws; ++k) sum = sum + raws[static_cast<size_t>(k)].floats()[i];
    for (int k = 0; k < way.encodeds; ++k) {
      const float next = contents[static_cast<size_t>(k)].floats()[i];
      sum = way.raws == 0 && k == 0 ? next : sum + next;
    }
    sum = sum * way.scale;
    if (way.residual) sum = sum + residual.floats()[i];
    y.floats()[i] = sum;
  }
  const Buffer expected_message = encode(encoding, y);
  const Buffer expected = way.message ? decode(encoding, expected_message, count) : y;

  std::vector<const float*> raw;
  std::vector<const void*> encoded;
  std::vector<float*> decoded;
  for (const Buffer& buffer : raws) raw.push_back(buffer.floats());
  for (const Buffer& buffer : messages) encoded.push_back(buffer.data());
  for (const Buffer& buffer : outputs) decoded.push_back(buffer.floats());
  if (way.in_place) decoded[0] = raws[0].floats();
  Transcode work{encoding,
                 count,
                 raw,
                 encoded,
                 way.scale,
                 way.residual ? residual.floats() : nullptr,
                 way.message ? message.data() : nullptr,
                 decoded};
  transcode(work);

  if (way.message) EXPECT_EQ(test::first_difference(message, expected_message), message.bytes());
  for (size_t i = 0; i < count; ++i) {
    for (float* out : decoded) CHECK(same_bits(out[i], expected.floats()[i]) || out[i] == expected.floats()[i]);
    if (way.residual && way.message) {
      const float rest = y.floats()[i] - expected.floats()[i];
      CHECK_EQ(residual.floats()[i], std::isfinite(rest) ? rest : 0.0f);
    }
  }
  EXPECT(residual.whole() && message.whole());
  for (const Buffer& buffer : outputs) EXPECT(buffer.whole());
  for (const Buffer& buffer : raws) EXPECT(buffer.whole());
}

}  // namespace

TEST(every_way_of_calling) {
  for (const Encoding& encoding : kEncodings) {
    for (const size_t count : kCounts) {
      for (const Way& way : kWays) check_way(encoding, count, way);
    }
  }
}

// Beyond this size outputs and messages are written past the caches.
TEST(large_vectors) {
  check_way({Codec::kF16, 0}, (size_t{4} << 20) + 777, {2, 0, 0.5f, true, true, 1, false, 0});
  check_way({Codec::kMinMax8, 0}, (size_t{2} << 20) + 777, {1, 1, 1, false, false, 1, true, 4});
}

TEST(lengths) {
  EXPECT_EQ(encoded_bytes({Codec::kNone, 0}, 5), 20u);
  EXPECT_EQ(encoded_bytes({Codec::kF16, 0}, 5), 10u);
  EXPECT_EQ(encoded_bytes({Codec::kE4M3, 0}, 513), 516u + 8);
  EXPECT_EQ(encoded_bytes({Codec::kMinMax8, 0}, 513), 516u + 16);
  EXPECT_EQ(encoded_bytes({Codec::kInt4, 0}, 129), 68u + 8);
  EXPECT_EQ(encoded_bytes({Codec::kSign1, 0}, 1025), 132u + 8);
  EXPECT_EQ(encoded_bytes({Codec::kTopK, 65}, 16384 + 1), (17u + 1) * 6);
  EXPECT_EQ(encoded_bytes({Codec::kInt2, 0}, 1025), 264u + 16);
  const size_t much = size_t{1} << 40;
  EXPECT_EQ(encoded_bytes({Codec::kNone, 0}, much), much * 4);
  EXPECT_EQ(encoded_bytes({Codec::kMinMax8, 0}, much + 1), much + 4 + (much / 512 + 1) * 8);
  EXPECT_EQ(encoded_bytes({Codec::kTopK, 65535}, much), much / 16384 * 16384 * 6);
  for (const Encoding& encoding : kEncodings) EXPECT_EQ(encoded_bytes(encoding, 0), 0u);
}

// Messages that no encoder wrote: nothing outside the buffers is read or written.
TEST(messages_of_random_bytes) {
  std::mt19937 random(4);
  for (const Encoding& encoding : kEncodings) {
    for (const size_t count : {1u, 77u, 1500u, 17000u}) {
      Buffer message(encoded_bytes(encoding, count));
      for (size_t i = 0; i < message.bytes(); ++i) message.data()[i] = static_cast<uint8_t>(random());
      decode(encoding, message, count);
    }
  }
}

// The formats, and how values are rounded, are the same on every processor: the checksum of messages and of what they
// decode to. Whoever changes a format changes the version of the protocol too.
TEST(bits_are_the_same_everywhere) {
  constexpr uint32_t kChecksums[] = {0xdf1659e2, 0xdddd9c0c, 0xc48676f2, 0xfa35e383, 0x0c35bd87, 0x0c20514d,
                                     0x9a556b68, 0x0a90b230, 0x12040ccf, 0xb2539619, 0x500e9b74, 0x40eb08dd};
  const size_t count = 80001;
  Buffer y(count * 4);
  fill(y.floats(), count, 77);
  sprinkle(y.floats() + count / 2, count / 2, 78);
  for (size_t i = 2000; i < 4000; ++i) y.floats()[i] *= 0x1p-130f;
  for (size_t i = 4000; i < 6000; ++i) y.floats()[i] *= 0x1p122f;
  for (size_t i = 6000; i < 8000; ++i) y.floats()[i] = y.floats()[i] * 0x1p-10f + 12345.0f;
  size_t e = 0;
  for (const Encoding& encoding : kEncodings) {
    const Buffer message = encode(encoding, y);
    const Buffer decoded = decode(encoding, message, count);
    const uint32_t of_message = crc32c(message.data(), message.bytes(), 0);
    EXPECT_EQ(crc32c(decoded.data(), decoded.bytes(), of_message), kChecksums[e]);
    ++e;
  }
}

}  // namespace bagua
