// The loop over tiles that all codecs but top-k share. A codec C defines
//   kTilePayload, kTileParameters       bytes of a full tile
//   payload_bytes(n), parameter_bytes(n)  of n elements, any number
//   encode(y, n, payload, parameters)   a full tile, of which n elements count (the others are neutral, see pad)
//   decode<add>(payload, parameters, base, out)   a full tile: out = decoded, or base + decoded
//   pad(y, n, out), unpad(in, n, out)   n < kTile elements to the places of a full tile, and back
// The last, incomplete tile is copied to a full tile on the stack, so that codecs need code for full tiles alone.
#pragma once

#include <algorithm>
#include <cstring>

#include "codec/formats.h"
#include "codec/streams.h"

namespace bagua::codec {

// Messages and outputs of at least this many bytes do not fit into the caches: non-temporal stores write them.
constexpr size_t kPastCaches = size_t{8} << 20;

template <class C>
size_t message_bytes(size_t count) {
  return C::kTileParameters == 0 ? C::payload_bytes(count)
                                 : aligned4(C::payload_bytes(count)) + C::parameter_bytes(count);
}

template <class C>
class Tiles {
 public:
  explicit Tiles(const Transcode& work)
      : work_(work),
        streams_{work, work.count * sizeof(float) * work.decoded.size() >= kPastCaches},
        parameters_at_(aligned4(C::payload_bytes(work.count))),
        message_past_caches_(message_bytes<C>(work.count) >= kPastCaches) {}

  void run() {
    size_t at = 0;
    for (; at + kTile <= work_.count; at += kTile) full(at);
    if (at < work_.count) last(at, work_.count - at);
    if (streams_.past_caches || message_past_caches_) store_fence();
  }

 private:
  static constexpr size_t kParameterSpace = C::kTileParameters == 0 ? 4 : C::kTileParameters;

  size_t parameters_offset(size_t at) const { return parameters_at_ + at / kTile * C::kTileParameters; }
  static size_t payload_offset(size_t at) { return at / kTile * C::kTilePayload; }

  uint8_t* message() const { return static_cast<uint8_t*>(work_.message); }

  // Returns y of a full tile: in `space`, or a raw source itself.
  const float* gather(size_t at, float* space) const {
    const float* y = streams_.sum_raw(at, kTile, space);
    for (const void* const message : work_.encoded) {
      const uint8_t* payload = static_cast<const uint8_t*>(message) + payload_offset(at);
      const uint8_t* parameters = static_cast<const uint8_t*>(message) + parameters_offset(at);
      if (y == nullptr) {
        C::template decode<false>(payload, parameters, nullptr, space);
      } else {
        C::template decode<true>(payload, parameters, y, space);
      }
      y = space;
    }
    return finish(y, at, kTile, space);
  }

  // Applies scale and residual.
  const float* finish(const float* y, size_t at, size_t count, float* space) const {
    if (y == nullptr) {
      std::fill_n(space, count, 0.0f);
      y = space;
    }
    if (!streams_.scaled()) return y;
    streams_.scale(y, at, count, space);
    return space;
  }

  void full(size_t at) {
    // Without a message a single output can replace the buffer on the stack.
    const bool direct = work_.message == nullptr && work_.decoded.size() == 1 && !streams_.past_caches;
    const float* y = gather(at, direct ? work_.decoded[0] + at : sum_);
    if (work_.message == nullptr) {
      streams_.output(y, at, kTile);
      return;
    }
    uint8_t* payload = message() + payload_offset(at);
    uint8_t* parameters = message() + parameters_offset(at);
    if (message_past_caches_ && reinterpret_cast<uintptr_t>(payload) % kVectorBytes == 0) {
      C::encode(y, kTile, payload_, parameters);
      Streams::copy(payload_, C::kTilePayload, payload, true);
      after_encoding(y, at, payload_, parameters);
    } else {
      C::encode(y, kTile, payload, parameters);
      after_encoding(y, at, payload, parameters);
    }
  }

  void after_encoding(const float* y, size_t at, const uint8_t* payload, const uint8_t* parameters) {
    if (work_.residual == nullptr && work_.decoded.empty()) return;
    if (work_.residual == nullptr && work_.decoded.size() == 1 && !streams_.past_caches) {
      C::template decode<false>(payload, parameters, nullptr, work_.decoded[0] + at);
      return;
    }
    C::template decode<false>(payload, parameters, nullptr, decoded_);
    if (work_.residual != nullptr) streams_.update_residual(y, decoded_, at, kTile);
    streams_.output(decoded_, at, kTile);
  }

  // An incomplete tile of `count` elements.
  void last(size_t at, size_t count) {
    const float* y = gather_last(at, count);
    if (work_.message == nullptr) {
      streams_.output(y, at, count);
      return;
    }
    uint8_t parameters[kParameterSpace] = {};
    float* padded = padded_;
    C::pad(y, count, padded);
    C::encode(padded, count, payload_, parameters);
    const size_t payload_bytes = C::payload_bytes(count);
    std::memcpy(message() + payload_offset(at), payload_, payload_bytes);
    if (C::kTileParameters != 0) {
      const size_t gap = payload_offset(at) + payload_bytes;
      std::memset(message() + gap, 0, parameters_at_ - gap);
      std::memcpy(message() + parameters_offset(at), parameters, C::parameter_bytes(count));
    }
    if (work_.residual == nullptr && work_.decoded.empty()) return;
    C::template decode<false>(payload_, parameters, nullptr, padded);
    C::unpad(padded, count, decoded_);
    if (work_.residual != nullptr) streams_.update_residual(y, decoded_, at, count);
    streams_.output(decoded_, at, count);
  }

  const float* gather_last(size_t at, size_t count) {
    const float* y = streams_.sum_raw(at, count, sum_);
    for (const void* const message : work_.encoded) {
      const auto* const bytes = static_cast<const uint8_t*>(message);
      uint8_t parameters[kParameterSpace] = {};
      std::memset(payload_, 0, sizeof payload_);
      std::memcpy(payload_, bytes + payload_offset(at), C::payload_bytes(count));
      if (C::kTileParameters != 0) {
        std::memcpy(parameters, bytes + parameters_offset(at), C::parameter_bytes(count));
      }
      C::template decode<false>(payload_, parameters, nullptr, padded_);
      C::unpad(padded_, count, decoded_);
      for (size_t i = 0; i < count; ++i) sum_[i] = y == nullptr ? decoded_[i] : y[i] + decoded_[i];
      y = sum_;
    }
    return finish(y, at, count, sum_);
  }

  const Transcode& work_;
  const Streams streams_;
  const size_t parameters_at_;
  const bool message_past_caches_;
  alignas(64) float sum_[kTile];
  alignas(64) float decoded_[kTile];
  alignas(64) float padded_[kTile];
  alignas(64) uint8_t payload_[C::kTilePayload];
};

// pad() and unpad() of codecs that keep the order of elements in a tile.
struct InPlace {
  static void pad(const float* y, size_t n, float* out) {
    std::memcpy(out, y, n * sizeof(float));
    std::memset(out + n, 0, (kTile - n) * sizeof(float));
  }
  static void unpad(const float* in, size_t n, float* out) { std::memcpy(out, in, n * sizeof(float)); }
};

}  // namespace bagua::codec
