// Sizes of the formats of codec.h. All codecs but top-k work in tiles of 1024 elements, and a tile holds whole blocks.
// In a message all payloads come first, then the parameters of all blocks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codec/codec.h"

namespace bagua::codec {

constexpr size_t kTile = 1024;
constexpr size_t kByteBlock = 512;    // of kE4M3, kE5M2 and kMinMax8
constexpr size_t kNibbleBlock = 128;  // of kInt4
constexpr size_t kTopKBlock = 16384;

constexpr size_t kWordElements = 32;  // a bit of a word for each, in kSign1 and kInt2

// kInt2: an element is large if its magnitude is above the block's mean magnitude times this. 1.23 is best for normal
// numbers, 1.59 for Laplace-distributed ones (Lloyd, "Least squares quantization in PCM", 1982). As large and small
// ones decode to their own means, a threshold in between is within 2.5 % of the best error of either.
constexpr float kThreshold = 1.375f;

// Magnitudes are added up as 2^-11 of themselves, so that no sum of a block overflows.
constexpr float kShrink = 0x1p-11f;
constexpr float kLeastMean = 0x1p-118f;  // smaller means count as 0: shrunk numbers lose bits there
constexpr float kLargest = 0x1.fffffep127f;

constexpr size_t blocks_of(size_t count, size_t block) {
  return count / block + (count % block != 0 ? 1 : 0);
}
constexpr size_t aligned4(size_t bytes) {
  return (bytes + 3) & ~size_t{3};
}

// Number of elements that kTopK keeps of a block of `count` elements.
constexpr size_t kept_of(size_t count, uint16_t density) {
  return (count * density + 65535) / 65536;
}

// The same for a vector of `count` elements, which may have many blocks.
constexpr size_t kept_of_all(size_t count, uint16_t density) {
  return count / kTopKBlock * kept_of(kTopKBlock, density) + kept_of(count % kTopKBlock, density);
}

}  // namespace bagua::codec
