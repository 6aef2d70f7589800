// Lossy encodings of float32 vectors for messages between hosts: formats, sizes, and fused kernels.
//
// A vector of `count` elements becomes one message of encoded_bytes(encoding, count) bytes. The length does not depend
// on the values, so both ends know it. Blocks of a format are counted from the vector's first element. The encodings
// are part of the wire format, and GPU ranks write the same bits: never renumber or reorder them.
//
// A message is little-endian. The payload of all elements comes first, then zeros up to a multiple of 4 bytes, then the
// parameters of all blocks (float32), if the codec has parameters. The last block may be incomplete; then its payload
// is shorter. All arithmetic is float32, and every operation rounds to nearest even (no fused multiply-add, denormals
// are kept), so every processor writes the same bits. Below, n is the number of elements of a block, y an element, q
// its code, and rn() rounds to the nearest integer, ties to even.
//
//   codec     block  payload of an element        parameters   decoded
//   none             4 bytes                                   y
//   fp16             2 bytes, IEEE half                        q
//   bf16             2 bytes, bfloat16                         q
//   fp8_e4m3    512  1 byte, e4m3fn               s            q * s
//   fp8_e5m2    512  1 byte, e5m2                 s            q * s
//   minmax8     512  1 byte                       low, step    q * step + low; step < 0: 2 * (q * -step + low)
//   int4        128  4 bits: q + 8                step         q * step, q from -7 to 7
//   onebit     1024  1 bit: y is negative         mean         mean or -mean
//   topk      16384  see below                                 the kept values, 0 elsewhere
//   int2       1024  2 bits: y is negative, y is large  small, large  small or -small, large or -large
//
// fp16, bf16: rounded to nearest even; values that are too large become infinite. NaN becomes quiet, and keeps its sign
//   and upper bits.
// fp8: s is the smallest power of two, at least 2^-126, for which no finite |y| / s is over 448 (e4m3) or 57344 (e5m2);
//   q = y / s to nearest even, with subnormal codes; a value that would decode to 2^128 is rounded down. Magnitudes
//   under 2^-118 have an absolute precision of 2^-136. NaN: 0x7f; infinity: 0x7f in e4m3, 0x7c in e5m2; both with the
//   sign.
// minmax8: low = the minimum (-0 before +0), range = maximum - minimum; q = rn((y - low) * (255 / range)),
//   step = range / 255. A range under 2^-118 counts as 0: q and step are 0, so constant blocks are exact. If an extreme
//   is 2^126 or more, differences could overflow: then all y are halved first, and step is (range / 255) * (1 - 2^-20).
//   A negative sign of the stored step marks such a block; if range is 0, low is stored unhalved instead.
// int4: m = the largest magnitude, q = rn(y * (7 / m)), step = m / 7; m under 2^-118 counts as 0. Byte j of a block
//   holds element j in its low four bits and element j + h in the high ones, h = 64 (last block of n: (n + 1) / 2).
// onebit: bit i % 8 of byte i / 8 belongs to element i. mean = (sum of |y|) / n, with 32 sums side by side (sum l takes
//   elements l, l + 32, ...), then sum[l] += sum[l + 16], then 8, 4, 2, 1. If this overflows although all y are finite,
//   every |y| is multiplied by 2^-10 first and the quotient by 2^10, and the largest |y| is the limit of the result.
// int2: s = |y| * 2^-11, m = (sum of s) / n; elements with s > 1.375 m are large. The parameter small (large) is the
//   mean of s of those that are not (are) large, times 2^11, at most the largest finite number; 0 if there are none.
//   Sums are those of onebit. If m is under 2^-129, both are 0. The payload has for every 32 elements a word of signs,
//   then a word with a 1 for each large one, lowest bit first.
// topk: k = ceil(n * density / 65536) elements of a block are kept: those of the largest magnitudes, at equal
//   magnitudes the first. Magnitudes are compared as integers, so NaN ranks above infinity, and infinity above numbers.
//   The message has the kept values of all blocks (float32, unchanged), then without padding their positions in the
//   block (uint16). Blocks are in order, and positions ascend within a block.
//
// NaN and infinity. fp16, bf16 and e5m2 keep them. e4m3 turns infinity into NaN. minmax8, int4, int2, onebit: if an
// element of a block is not finite, the whole block decodes to NaN (the parameters are NaN, 0x7fc00000; the payload of
// minmax8 and int4 is 0). topk keeps them first, so each block that has one sends at least one. They do not affect
// other blocks. A residual that would not be finite is stored as 0, so that the next step starts clean.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

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
  kInt2 = 9,     // the sign, scaled by the mean of a block's large or small magnitudes
};
constexpr int kCodecs = 10;

struct Encoding {
  Codec codec = Codec::kNone;
  uint16_t density = 0;  // kTopK: elements kept of 65536, at least 1; other codecs: 0
};

// Name in the API: "none", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "minmax8", "int4", "onebit", "topk", "int2".
const char* codec_name(Codec codec);
// True if the codec exists and the density is valid for it.
constexpr bool encoding_known(uint8_t codec, uint16_t density) {
  return codec < kCodecs && (codec == static_cast<uint8_t>(Codec::kTopK)) == (density != 0);
}
// Bytes of a message. Exact for every count up to 2^48.
size_t encoded_bytes(Encoding encoding, size_t count);

// Sources and results of one pass over a vector. `encoded` and `message` are messages, all other vectors are float32.
// Pointers are aligned to 4 bytes, messages to 64. A `decoded` may be one of `raw`; no other overlap.
//   y = (sum of raw + sum of encoded) * scale [+ carried, or residual if that is not given]
//   message  = encode(y)                          if given
//   residual = y - decode(message)                if given (and message is)
//   decoded[j] = decode(message), or y if there is no message
// Addends are summed in the order of `raw`, then of `encoded`, so that a result has the same bits in every run.
struct Transcode {
  Encoding encoding;
  size_t count = 0;
  std::vector<const float*> raw = {};
  std::vector<const void*> encoded = {};
  float scale = 1.0f;
  float* residual = nullptr;
  void* message = nullptr;
  std::vector<float*> decoded = {};
  const float* carried = nullptr;  // may be `residual`; only with one
};

// Makes one pass over memory, in tiles of 1024 elements (top-k: 16384) that stay in the caches. A message with invalid
// content can't make it read or write outside the buffers. Thread-safe. Uses less than 32 KiB of stack.
void transcode(const Transcode& work);

}  // namespace bagua
