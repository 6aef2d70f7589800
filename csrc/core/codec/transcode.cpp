#include "codec/codec.h"
#include "codec/float_tiles.h"
#include "codec/formats.h"
#include "codec/fp8_tiles.h"
#include "codec/level_tiles.h"
#include "codec/sign_tiles.h"

namespace bagua {

namespace {

struct Format {
  const char* name;
  size_t (*bytes)(size_t count);
  void (*transcode)(const Transcode& work);
};

template <class C>
constexpr Format format(const char* name) {
  return {name, codec::message_bytes<C>, [](const Transcode& work) { codec::Tiles<C>(work).run(); }};
}

constexpr Format kFormats[kCodecs] = {
    format<codec::PlainTiles>("none"),          format<codec::HalfTiles<Half>>("fp16"),
    format<codec::HalfTiles<BFloat16>>("bf16"), format<codec::E4M3Tiles>("fp8_e4m3"),
    format<codec::E5M2Tiles>("fp8_e5m2"),       format<codec::MinMaxTiles>("minmax8"),
    format<codec::Int4Tiles>("int4"),           format<codec::SignTiles>("onebit"),
    {"topk", nullptr, codec::transcode_top_k},  format<codec::Int2Tiles>("int2")};

const Format& format_of(Codec codec) {
  return kFormats[static_cast<size_t>(codec)];
}

}  // namespace

const char* codec_name(Codec codec) {
  return format_of(codec).name;
}

size_t encoded_bytes(Encoding encoding, size_t count) {
  if (encoding.codec != Codec::kTopK) return format_of(encoding.codec).bytes(count);
  return codec::kept_of_all(count, encoding.density) * (sizeof(float) + sizeof(uint16_t));
}

void transcode(const Transcode& work) {
  format_of(work.encoding.codec).transcode(work);
}

}  // namespace bagua
