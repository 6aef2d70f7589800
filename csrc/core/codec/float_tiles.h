// kNone, kF16, kBF16: one number per element, no parameters.
#pragma once

#include "codec/tiles.h"
#include "kernel/half.h"

namespace bagua::codec {

struct NoParameters : InPlace {
  static constexpr size_t kTileParameters = 0;
  static size_t parameter_bytes(size_t) { return 0; }
};

struct PlainTiles : NoParameters {
  static constexpr size_t kTilePayload = kTile * sizeof(float);
  static size_t payload_bytes(size_t n) { return n * sizeof(float); }

  static void encode(const float* y, size_t, uint8_t* payload, uint8_t*) { std::memcpy(payload, y, kTilePayload); }

  template <bool add>
  static void decode(const uint8_t* payload, const uint8_t*, const float* base, float* out) {
    if constexpr (add) {
      for (size_t i = 0; i < kTile; i += kLanes) store(load<F>(base + i) + load<F>(payload + 4 * i), out + i);
    } else {
      std::memcpy(out, payload, kTilePayload);
    }
  }
};

// T: Half or BFloat16.
template <class T>
struct HalfTiles : NoParameters {
  static constexpr size_t kTilePayload = kTile * sizeof(T);
  static size_t payload_bytes(size_t n) { return n * sizeof(T); }

  static void encode(const float* y, size_t, uint8_t* payload, uint8_t*) {
    auto* to = reinterpret_cast<T*>(payload);
    for (size_t i = 0; i < kTile; i += kLanes) {
      const F v = load<F>(y + i);
      Lanes<T>::pack(&v, to + i);
    }
  }

  template <bool add>
  static void decode(const uint8_t* payload, const uint8_t*, const float* base, float* out) {
    const auto* from = reinterpret_cast<const T*>(payload);
    for (size_t i = 0; i < kTile; i += kLanes) {
      F v;
      Lanes<T>::load(from + i, 0, &v);
      if constexpr (add) v = load<F>(base + i) + v;
      store(v, out + i);
    }
  }
};

}  // namespace bagua::codec
