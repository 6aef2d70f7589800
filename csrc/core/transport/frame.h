// The wire format of a stream after the handshake: frames of a fixed header and a payload. Little-endian.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "base/crc32c.h"

namespace bagua {

// kPing asks the peer's driving thread for a sign of life, and kPong answers; both have no payload.
enum class FrameType : uint8_t { kData = 1, kControl = 2, kPing = 3, kPong = 4 };

struct FrameHeader {
  static constexpr uint32_t kMagic = 0x46554742;  // "BGUF"

  uint32_t magic = kMagic;
  uint16_t header_bytes = 64;
  FrameType type = FrameType::kData;
  uint8_t reserved_byte = 0;
  uint64_t generation = 0;
  uint32_t comm = 0;
  uint32_t payload_bytes = 0;
  uint64_t op = 0;        // data frames only
  uint64_t tag = 0;       // data frames only
  uint64_t sequence = 0;  // consecutive on each stream and direction, from 0
  uint32_t payload_crc = 0;
  uint32_t reserved[2] = {0, 0};
  uint32_t header_crc = 0;  // CRC-32C of all fields before it

  uint32_t compute_crc() const { return crc32c(this, offsetof(FrameHeader, header_crc)); }
};
static_assert(sizeof(FrameHeader) == 64 && std::is_trivially_copyable_v<FrameHeader>);
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "headers are sent as they lie in memory");

}  // namespace bagua
