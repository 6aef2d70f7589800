// Lossy encodings of float32 vectors, for what crosses between hosts: formats, sizes, and the fused kernels.
//
// One vector of `count` elements makes one message of encoded_bytes(encoding, count) bytes, whatever its values, so
// that both ends know its length. Blocks of a format begin at the vector's first element. Formats are part of the wire
// format (a GPU rank has to write the same bits): never renumber, never reorder.
#pragma once

#include <cstddef>
#include <cstdint>

namespace bagua {

enum class Codec : uint8_t {
  kNone = 0,     // float32 as it is
  kF16 = 1,      // IEEE half, round to nearest even
  kBF16 = 2,     // bfloat16, round to nearest even
  kE4M3 = 3,     // fp8 e4m3fn, each block scaled by a power of two
  kE5M2 = 4,     // fp8 e5m2, the same
  kMinMax8 = 5,  // 8 bits between a block's minimum and maximum
  kInt4 = 6,     // 4 bits, symmetric, scaled by a block's largest magnitude
  kSign1 = 7,    // the sign, scaled by a block's mean magnitude
  kTopK = 8,     // the `density` largest magnitudes of a block, as position and value
};
constexpr int kCodecs = 9;

struct Encoding {
  Codec codec = Codec::kNone;
  uint16_t density = 0;  // kTopK: elements kept of 65536, at least 1; other codecs: 0
};

const char* codec_name(
    Codec codec);  // for the API: "fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "minmax8", "int4", "onebit", "topk"
bool encoding_known(uint8_t codec, uint16_t density);
size_t encoded_bytes(Encoding encoding, size_t count);

// What one pass over a vector reads and writes. Everything but `encoded` messages is float32. All pointers are aligned
// to 4 bytes, messages to 64. A `decoded` may be one of `raw`; no other overlap.
//   y = (sum of raw + sum of encoded) * scale [+ residual]
//   message  = encode(y)                          if given
//   residual = y - decode(message)                if given (and message is)
//   decoded[j] = decode(message), or y without one
// The sums are taken in the order of `raw`, then of `encoded`, so that a result has the same bits in every run.
struct Transcode {
  Encoding encoding;
  size_t count = 0;
  const float* const* raw = nullptr;
  int raws = 0;
  const void* const* encoded = nullptr;
  int encodeds = 0;
  float scale = 1.0f;
  float* residual = nullptr;
  void* message = nullptr;
  float* const* decoded = nullptr;
  int decodeds = 0;
};

// One pass over memory: a block goes through the first-level cache once. Never reads or writes outside the buffers.
void transcode(const Transcode& work);

}  // namespace bagua
