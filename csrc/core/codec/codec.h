// Lossy encodings of float32 vectors that are sent between hosts: formats, sizes, and the fused kernels.
//
// One vector of `count` elements makes one message of encoded_bytes(encoding, count) bytes, whatever its values, so
// that both ends know its length. Blocks of a format begin at the vector's first element. Formats are part of the wire
// format (a GPU rank has to write the same bits): never renumber, never reorder.
//
// A message is little-endian: first the payload of all elements, then zeros up to a multiple of 4 bytes, then the
// parameters of all blocks (float32), where the codec has any. The last block may be incomplete: it has as many bytes
// as its elements need. All arithmetic is float32, every operation rounded to nearest even on its own (no fused
// multiply-add, denormals kept), so every processor writes the same bits. n: elements of a block, y: one of them,
// q: its code, rn: to the nearest integer, ties to even.
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
//
// fp16, bf16: to nearest even, too large becomes infinite. A NaN keeps its sign and upper bits, and is quiet.
// fp8: s is the smallest power of two, at least 2^-126, for which no finite |y| / s is over 448 (e4m3) or 57344 (e5m2);
//   q = y / s to nearest even, with subnormal codes; what would become 2^128 is rounded down. Magnitudes under 2^-118
//   keep an absolute precision of 2^-136. NaN: 0x7f; infinity: 0x7f in e4m3, 0x7c in e5m2; both with the sign.
// minmax8: low = the minimum (-0 before +0), range = maximum - minimum; q = rn((y - low) * (255 / range)),
//   step = range / 255. A range under 2^-118 counts as 0: q and step are 0, so constant blocks are exact. If an extreme
//   is 2^126 or more, differences could overflow: all y are halved first, step is
//   (range / 255) * (1 - 2^-20), and is stored negative to say so (range 0: low as it is).
// int4: m = the largest magnitude, q = rn(y * (7 / m)), step = m / 7; m under 2^-118 counts as 0. Byte j of a block
//   holds element j in its low four bits and element j + h in the high ones, h = 64 (last block of n: (n + 1) / 2).
// onebit: bit i % 8 of byte i / 8 belongs to element i. mean = (sum of |y|) / n, with 32 sums side by side (sum l takes
//   elements l, l + 32, ...), then sum[l] += sum[l + 16], then 8, 4, 2, 1. If that is infinite though all y are finite,
//   every |y| is multiplied by 2^-10, the quotient by 2^10, and the result is at most the largest |y|.
// topk: k = ceil(n * density / 65536) elements of a block are kept, those of the largest magnitudes (as integers of
//   their bits, so NaN before infinity before numbers), at equal magnitudes those that come first. The message is all
//   kept values (float32, as they are), then their positions in the block (uint16), ascending within a block, blocks
//   in order. There is no padding between the two.
//
// NaN and infinity. fp16, bf16, e5m2: they stay. e4m3: infinity becomes NaN. minmax8, int4, onebit: if an element of a
// block is not finite, the whole block decodes to NaN (the parameters are NaN, 0x7fc00000; the payload of minmax8 and
// int4 is 0). topk: they are the first to be kept, so at least one is seen in each block. Nothing passes from a block
// to another. A residual that would not be finite is stored as 0: the next step is free of it.
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

// For the API: "none", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "minmax8", "int4", "onebit", "topk".
const char* codec_name(Codec codec);
// The codec exists, and the density fits it.
bool encoding_known(uint8_t codec, uint16_t density);
// Exact for every count up to 2^48.
size_t encoded_bytes(Encoding encoding, size_t count);

// Sources and results of one pass over a vector. Everything but `encoded` messages is float32. All pointers are aligned
// to 4 bytes, messages to 64. A `decoded` may be one of `raw`; no other overlap.
//   y = (sum of raw + sum of encoded) * scale [+ carried, or residual if that is not given]
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
  const float* carried = nullptr;  // may be `residual`; only with one
  void* message = nullptr;
  float* const* decoded = nullptr;
  int decodeds = 0;
};

// One pass over memory: a tile of 1024 elements (top-k: 16384) goes through the caches once. Never reads or writes
// outside the buffers, whatever is in a message. Thread-safe. Keeps under 32 KiB on the stack.
void transcode(const Transcode& work);

}  // namespace bagua
