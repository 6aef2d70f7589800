// The wire format between two plugins. Little-endian.
//
// A connection carries messages in one direction, from the connecting to the listening side, on a control socket and
// one or more data sockets. Each socket begins with a Hello. When all have arrived, the listener sends one Answer on
// the control socket, the only bytes in that direction. The control socket then carries small messages in order, each
// after a SmallHeader. A large message is sent in chunks, each after a Header, on any data sockets. On each data socket
// the numbers of messages ascend.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "base/sha256.h"
#include "nccl_net/nccl_net_abi.h"

namespace bagua::nccl_net {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "headers are sent as they lie in memory");

constexpr uint16_t kProtocolVersion = 3;

// A secret in the handle that NCCL distributes: the listener accepts a connection only with this nonce.
struct Nonce {
  uint8_t bytes[16];
  bool equals(const Nonce& other) const { return equal_constant_time(bytes, other.bytes, sizeof bytes); }
};

// The handle that listen() gives to NCCL, which carries it to the process that calls connect().
struct Handle {
  static constexpr uint32_t kMagic = 0x484e4742;  // "BGNH"
  uint32_t magic;
  uint16_t version;
  uint16_t family;  // 4 or 6
  uint8_t address[16];
  uint16_t port;
  uint16_t zero;
  uint32_t link_local;  // 1: a link-local address, on the link of the connecting side
  Nonce nonce;
  uint64_t attempt;  // 0 at first; then the number of an attempt of connect()
  uint8_t reserved[72];
};
static_assert(sizeof(Handle) == kHandleBytes && std::is_trivially_copyable_v<Handle>);

// The first bytes on each socket. Magic, version and nonce keep their places in all versions.
struct Hello {
  static constexpr uint32_t kMagic = 0x434e4742;  // "BGNC"
  uint32_t magic;
  uint16_t version;
  uint16_t streams;  // data sockets of the connection
  Nonce nonce;
  Nonce connection;  // the same on all sockets of one connection
  uint16_t index;    // 0: control, else a data socket
  uint8_t reserved[22];
};
static_assert(sizeof(Hello) == 64 && std::is_trivially_copyable_v<Hello>);

// Says that the connection is accepted, or that its version is unknown.
struct Answer {
  static constexpr uint32_t kMagic = 0x414e4742;  // "BGNA"
  uint32_t magic;
  uint16_t version;   // the listener's
  uint16_t accepted;  // 1: yes
};
static_assert(sizeof(Answer) == 8 && std::is_trivially_copyable_v<Answer>);

// Precedes a small message. It is short, so that tiny messages are not mostly header. From kPaddedFrom bytes on it is
// padded with zeros: then payloads are aligned in the kernel's pages, and some processors copy them in half the time.
struct SmallHeader {
  // The upper 11 bits of `mark` are an unlikely number, to detect a reader that has lost its place. The lower bits are
  // the size in bytes.
  static constexpr uint32_t kMark = 0x5e200000;
  static constexpr uint32_t kMostBytes = (uint32_t{1} << 21) - 1;
  uint32_t mark;
  uint32_t message;  // lower half of the message's number
};
static_assert(sizeof(SmallHeader) == 8 && std::is_trivially_copyable_v<SmallHeader>);

constexpr uint64_t kPaddedFrom = 8 << 10;
constexpr size_t kPaddedBytes = 32;
// Bytes before the payload of a small message.
constexpr size_t small_header_bytes(uint64_t total) {
  return total < kPaddedFrom ? sizeof(SmallHeader) : kPaddedBytes;
}

struct Header {
  static constexpr uint32_t kSmall = 0xba60a001;  // never sent: marks a SmallHeader in this form
  static constexpr uint32_t kChunk = 0xba60a003;  // data: `length` bytes follow
  uint32_t kind;
  uint32_t length;
  uint64_t message;  // counted from 0 on each connection, small and large together
  uint64_t offset;   // of the chunk in the message
  uint64_t total;    // bytes of the message
};
static_assert(sizeof(Header) == 32 && std::is_trivially_copyable_v<Header>);

}  // namespace bagua::nccl_net
