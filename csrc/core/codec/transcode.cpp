#include "codec/codec.h"
#include "codec/float_tiles.h"
#include "codec/formats.h"
#include "codec/fp8_tiles.h"
#include "codec/level_tiles.h"
#include "codec/sign_tiles.h"
#include "codec/top_k.h"

namespace bagua {

const char* codec_name(Codec codec) {
  constexpr const char* kNames[kCodecs] = {"none",    "fp16", "bf16",   "fp8_e4m3", "fp8_e5m2",
                                           "minmax8", "int4", "onebit", "topk"};
  return kNames[static_cast<int>(codec)];
}

size_t encoded_bytes(Encoding encoding, size_t count) {
  using namespace codec;
  switch (encoding.codec) {
    case Codec::kNone:
      return message_bytes<PlainTiles>(count);
    case Codec::kF16:
      return message_bytes<HalfTiles<Half>>(count);
    case Codec::kBF16:
      return message_bytes<HalfTiles<BFloat16>>(count);
    case Codec::kE4M3:
      return message_bytes<E4M3Tiles>(count);
    case Codec::kE5M2:
      return message_bytes<E5M2Tiles>(count);
    case Codec::kMinMax8:
      return message_bytes<MinMaxTiles>(count);
    case Codec::kInt4:
      return message_bytes<Int4Tiles>(count);
    case Codec::kSign1:
      return message_bytes<SignTiles>(count);
    case Codec::kTopK:
      return kept_of_all(count, encoding.density) * (sizeof(float) + sizeof(uint16_t));
  }
  return 0;
}

void transcode(const Transcode& work) {
  using namespace codec;
  switch (work.encoding.codec) {
    case Codec::kNone:
      return Tiles<PlainTiles>(work).run();
    case Codec::kF16:
      return Tiles<HalfTiles<Half>>(work).run();
    case Codec::kBF16:
      return Tiles<HalfTiles<BFloat16>>(work).run();
    case Codec::kE4M3:
      return Tiles<E4M3Tiles>(work).run();
    case Codec::kE5M2:
      return Tiles<E5M2Tiles>(work).run();
    case Codec::kMinMax8:
      return Tiles<MinMaxTiles>(work).run();
    case Codec::kInt4:
      return Tiles<Int4Tiles>(work).run();
    case Codec::kSign1:
      return Tiles<SignTiles>(work).run();
    case Codec::kTopK:
      return transcode_top_k(work);
  }
}

}  // namespace bagua
