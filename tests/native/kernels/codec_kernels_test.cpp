// bagua_kernels_transcode() against the core's transcode(), bit for bit.
#include <functional>

#include "rig.h"

namespace bagua {
namespace {

using test::Buffer;
using test::Buffers;
using test::compare;
using test::kEncodings;
using test::Kind;
using test::kWays;
using test::Way;

// The most frequent calls: encoding with a residual, adding messages to a part, decoding.
const Way kUsualWays[] = {
    {1, 0, 0.5f, true, true, 0, false, 0},
    {1, 2, 1, false, true, 1, true, 0},
    {0, 1, 1, false, false, 1, false, 4},
};

// Around the edges of blocks (128, 512, 1024, 16384) and beyond one round of the emulated device's warps.
const size_t kCounts[] = {1,   2,   3,   7,   9,   63,   64,   65,   127,  128,  129,  255,
                          385, 511, 512, 513, 640, 1023, 1024, 1025, 1151, 2047, 2048, 5001};

TEST(edges) {
  int order = 0;
  for (const Encoding& encoding : kEncodings) {
    for (const size_t count : kCounts) {
      emulation::set_order(order++ % 2);
      for (const Way& way : kUsualWays) compare(encoding, count, way, Kind::kUsual);
    }
  }
}

TEST(ways) {
  for (const Encoding& encoding : kEncodings) {
    for (const size_t count : {size_t{640}, size_t{1151}}) {
      for (const Way& way : kWays) compare(encoding, count, way, Kind::kUsual);
    }
  }
}

TEST(kinds_of_values) {
  for (const Encoding& encoding : kEncodings) {
    for (const Kind kind : test::kKinds) {
      for (const Way& way : kUsualWays) {
        compare(encoding, 2500, way, kind);
        compare(encoding, 2500, {1, 0, 1, false, true, 1, false, 0}, kind);
      }
    }
  }
}

// More units than the device has warps at once, and more blocks of top-k than one.
TEST(long_vectors) {
  for (const Encoding& encoding : kEncodings) {
    compare(encoding, 2 * 3 * 8 * 1024 + 1700, {1, 1, 1, true, true, 1, true, 0}, Kind::kUsual);
  }
  emulation::set_order(1);
  // Kept of a block: 1, 1, 164, 256, 257, 2048, 2049, half, nearly all. Where candidates come from changes at two.
  for (const int density : {1, 4, 656, 1024, 1025, 8192, 8193, 32768, 65535}) {
    const Encoding encoding{Codec::kTopK, static_cast<uint16_t>(density)};
    for (const Kind kind : test::kKinds) compare(encoding, 16384 + 99, {1, 0, 1, true, true, 1, false, 0}, kind);
    compare(encoding, 2 * 16384 + 5, {1, 2, 1, false, true, 1, false, 0}, Kind::kUsual);
    compare(encoding, 16384, {2, 0, 1, false, true, 0, false, 4}, Kind::kEqual);
  }
  emulation::set_order(0);
}

// For any bytes in a message, nothing outside the buffers is touched (ASan), and all but repeated top-k positions mean
// the same as on the CPU.
TEST(garbage) {
  std::mt19937 random(5);
  for (const Encoding& encoding : kEncodings) {
    for (const size_t count : {size_t{1}, size_t{700}, size_t{1500}}) {
      const Way way{0, 2, 1, false, false, 1, false, 0};
      const Buffers expected(encoding, count, way, Kind::kUsual);
      for (const Buffer& message : expected.messages) {
        for (size_t i = 0; i < message.bytes(); ++i) message.data()[i] = static_cast<uint8_t>(random());
      }
      const Buffers found(expected);
      test::call(encoding, count, way, expected, false);
      test::call(encoding, count, way, found, true);
      if (encoding.codec == Codec::kTopK) continue;
      for (size_t i = 0; i < count; ++i) {
        const float a = expected.outputs[0].floats()[i];
        const float b = found.outputs[0].floats()[i];
        if (!(std::memcmp(&a, &b, 4) == 0 || (std::isnan(a) && std::isnan(b)))) {
          EXPECT_EQ(a, b);
          return;
        }
      }
    }
  }
}

// Every finite and infinite half and bfloat16, and floats around all of them.
TEST(sixteen_bits) {
  for (const Codec codec : {Codec::kF16, Codec::kBF16}) {
    Buffer message(65536 * 2);
    for (uint32_t h = 0; h < 65536; ++h) reinterpret_cast<uint16_t*>(message.data())[h] = static_cast<uint16_t>(h);
    const Way way{0, 1, 1, false, false, 1, false, 0};
    Buffers both[2] = {Buffers({codec, 0}, 65536, way, Kind::kZero), Buffers({codec, 0}, 65536, way, Kind::kZero)};
    for (int kernels = 0; kernels < 2; ++kernels) {
      std::memcpy(both[kernels].messages[0].data(), message.data(), message.bytes());
      test::call({codec, 0}, 65536, way, both[kernels], kernels == 1);
    }
    EXPECT_EQ(test::first_difference(both[0].outputs[0], both[1].outputs[0]), both[0].outputs[0].bytes());
    // The values, half a step above and below, and one bit further.
    for (const int32_t shift : {0, 1, -1, 0x1000, 0xfff, 0x1001, 0x8000, 0x7fff, 0x8001}) {
      const Way back{1, 0, 1, false, true, 0, false, 0};
      Buffers again[2] = {Buffers({codec, 0}, 65536, back, Kind::kZero), Buffers({codec, 0}, 65536, back, Kind::kZero)};
      for (int kernels = 0; kernels < 2; ++kernels) {
        for (size_t i = 0; i < 65536; ++i) {
          uint32_t bits;
          std::memcpy(&bits, both[0].outputs[0].floats() + i, 4);
          bits += static_cast<uint32_t>(shift);
          std::memcpy(again[kernels].raws[0].floats() + i, &bits, 4);
        }
        test::call({codec, 0}, 65536, back, again[kernels], kernels == 1);
      }
      EXPECT_EQ(test::first_difference(again[0].message, again[1].message), again[0].message.bytes());
    }
  }
}

// Every code, at every place of a word, with the scales that a message may have.
TEST(eight_bits) {
  for (const Codec codec : {Codec::kE4M3, Codec::kE5M2}) {
    const float scales[] = {1, 0x1p-126f, 0x1p-100f, 0x1p-1f, 0x1p60f, 0x1p112f, 0x1p119f};
    const size_t count = 512 * std::size(scales);
    const Way way{0, 1, 1, false, false, 1, false, 0};
    const Buffers expected({codec, 0}, count, way, Kind::kZero);
    const Buffer& message = expected.messages[0];
    for (size_t i = 0; i < count; ++i) message.data()[i] = static_cast<uint8_t>(i + i / 256);
    std::memcpy(message.data() + count, scales, sizeof scales);
    const Buffers found(expected);
    test::call({codec, 0}, count, way, expected, false);
    test::call({codec, 0}, count, way, found, true);
    EXPECT_EQ(test::first_difference(expected.outputs[0], found.outputs[0], true), count * 4);
  }
}

// Message and, if there is one, output of the same values by both.
void compare_values(Encoding encoding, size_t count, int outputs, const std::function<void(float*)>& fill) {
  const Way way{1, 0, 1, false, true, outputs, false, 0};
  const Buffers expected(encoding, count, way, Kind::kUsual);
  fill(expected.raws[0].floats());
  const Buffers found(expected);
  test::call(encoding, count, way, expected, false);
  test::call(encoding, count, way, found, true);
  EXPECT_EQ(test::first_difference(expected.message, found.message), expected.message.bytes());
  if (outputs == 0) return;
  EXPECT_EQ(test::first_difference(expected.outputs[0], found.outputs[0]), expected.outputs[0].bytes());
}

// They go into a message as they are, with sign and whatever else a codec has of them.
TEST(infinities_and_nan) {
  const uint32_t odd[] = {0x7f800000, 0xff800000, 0x7fc00000, 0xffc00000, 0x7fffffff,
                          0xffffffff, 0x7fc12345, 0xffd54321, 0x7f800001, 0xffa00000};
  for (const Encoding& encoding : kEncodings) {
    compare_values(encoding, 1700, 0, [&](float* values) {
      for (size_t i = 0; i < std::size(odd); ++i) std::memcpy(values + 33 * i, odd + i, 4);
    });
  }
}

// The smallest of a block is a 0 whose sign one element alone has.
TEST(signs_of_zero) {
  for (size_t place = 0; place < 512; place += 5) {
    for (const float others : {0.0f, 1.5f}) {
      compare_values({Codec::kMinMax8, 0}, 1024, 1, [&](float* values) {
        for (size_t i = 0; i < 1024; ++i) values[i] = i % 3 == 0 ? others : 0.0f;
        values[place] = -0.0f;
      });
    }
  }
}

// More NaN than are kept, all of them smaller than the one that a device makes.
TEST(many_nan) {
  const uint32_t small[] = {0x7f800001, 0xffa00000, 0x7f900000, 0xff800001};
  for (const int density : {4, 656, 1025, 8193}) {
    compare_values({Codec::kTopK, static_cast<uint16_t>(density)}, 16384 + 300, 1, [&](float* values) {
      for (size_t i = 0; i < 16384 + 300; i += 3) std::memcpy(values + i, small + i / 3 % 4, 4);
    });
  }
}

TEST(refused) {
  float value = 0;
  const float* raw[] = {&value};
  const auto result = [&](const std::function<void(BaguaTranscode&)>& change) {
    BaguaTranscode work{};
    work.count = 1;
    work.raw = raw;
    work.raws = 1;
    work.scale = 1;
    work.message = &value;
    change(work);
    return bagua_kernels_transcode(&work, nullptr);
  };
  EXPECT_EQ(result([](BaguaTranscode&) {}), 0);
  EXPECT_EQ(result([](BaguaTranscode& w) { w.codec = kCodecs; }), 1);
  EXPECT_EQ(result([](BaguaTranscode& w) { w.codec = 8; }), 1);  // no density
  EXPECT_EQ(result([](BaguaTranscode& w) { w.density = 5; }), 1);
  EXPECT_EQ(result([](BaguaTranscode& w) { w.raws = 17; }), 1);
  EXPECT_EQ(result([](BaguaTranscode& w) { w.raws = -1; }), 1);
  EXPECT_EQ(result([](BaguaTranscode& w) { w.encodeds = 16; }), 1);
  EXPECT_EQ(result([](BaguaTranscode& w) { w.decodeds = 5; }), 1);
  EXPECT_EQ(result([&](BaguaTranscode& w) { w.message = reinterpret_cast<uint8_t*>(&value) + 1; }), 1);
  raw[0] = nullptr;
  EXPECT_EQ(result([](BaguaTranscode&) {}), 1);
  EXPECT_EQ(result([](BaguaTranscode& w) { w.count = 0; }), 0);
}

}  // namespace
}  // namespace bagua
