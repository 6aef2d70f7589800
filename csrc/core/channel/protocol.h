// Messages between a rank and its daemon on the engine's Unix socket (SOCK_SEQPACKET: one message, one packet).
//
// rank -> daemon  Hello, first; then Require, Alloc, AllocForPeers, Borrow, Free, Comm, DestroyComm, Enter in any
// order;
//                 Bye or Failed, last.
// daemon -> rank  one Reply to each, in order. The reply to Hello carries three descriptors (JobPage, GenerationPage,
//                 RankChannel), the replies to Alloc, AllocForPeers and Borrow one (the segment), that to Enter one
//                 (the page of a generation that is newer than the rank's) or none (there is none yet; JobPage::changes
//                 tells when to ask again).
// Hello may carry the page that tells of the rank's death (lifeline.h).
// A member of an elastic job that has lost its daemon says Hello to the one that was started in its place, then Offer
// for each of its segments, with one descriptor.
// Requests have a fixed size per type (Comm: header and `members` numbers; Bye, Failed: header and `members` bytes of
// text, for people: how the rank ends). Anything else closes the connection.
#pragma once

#include <sys/un.h>

#include <cstdint>
#include <string>
#include <vector>

#include "base/fd.h"
#include "base/status.h"
#include "channel/layout.h"

namespace bagua {

constexpr uint32_t kProtocolMagic = 0x41475542;  // "BUGA", little-endian
constexpr size_t kTokenBytes = 32;
constexpr size_t kReplyText = 1024;
constexpr size_t kMaxWords = 2048;  // of Bye and Failed: the errors of ranks (kErrorBytes) hold them

enum class Message : uint32_t {
  kHello = 1,
  kAlloc = 2,
  kFree = 3,
  kComm = 4,
  kDestroyComm = 5,
  kBye = 6,
  kRequire = 7,
  kEnter = 8,
  kOffer = 9,
  kAllocForPeers = 10,
  kBorrow = 11,
  kFailed = 12
};

struct Request {
  explicit Request(Message type = Message::kHello, uint64_t value = 0) : type(type), value(value) {}

  uint32_t magic = kProtocolMagic;
  Message type;
  uint32_t version = 0;  // kHello: the wire version
  uint32_t member = 0;   // kHello; kBorrow: the owner
  // kAlloc, kAllocForPeers, kRequire: bytes. kFree, kOffer, kBorrow: segment. kComm, kDestroyComm: communicator.
  // kEnter: generation. kFailed: 1 if the rank is lost, and has not failed by itself
  uint64_t value;
  uint32_t members = 0;  // kComm: how many ranks follow, as uint32. kBye, kFailed: how many bytes
  // kComm, kDestroyComm: that which the process has entered last, the low half of the number. The engine may be ahead.
  uint32_t generation = 0;
  uint8_t token[kTokenBytes] = {};  // kHello
};
static_assert(sizeof(Request) == 64, "part of the protocol");

constexpr size_t kMaxRequest = sizeof(Request) + kMaxMembers * sizeof(uint32_t);

struct Reply {
  uint32_t magic = kProtocolMagic;
  uint32_t code = 0;   // Code; the text says why when it is not kOk
  uint64_t value = 0;  // kAlloc, kAllocForPeers: segment
  uint64_t bytes = 0;  // kAlloc, kAllocForPeers, kBorrow: size of the segment. kHello: size of the RankChannel
  char text[kReplyText] = {};
};

// Address of a Unix socket; kInvalid with the way out if the path is too long.
Status unix_address(const std::string& path, sockaddr_un* out);

// Sends one packet with up to four descriptors; never blocks: a full buffer is an error.
Status send_packet(int fd, const void* data, size_t bytes, const int* descriptors, int n);
// Receives one packet of at most `capacity` bytes. *bytes = 0: the other end closed. A longer packet, or one that the
// kernel had to cut, is kCorrupt. kTimeout: nothing there (the descriptor is non-blocking). kResource: it is lost,
// because this process has no room for the descriptors in it.
Status receive_packet(int fd, void* data, size_t capacity, size_t* bytes, std::vector<Fd>* descriptors);

// The rank's side.

// Connects with a deadline: the daemon's listen queue may be full for a moment. kUnavailable: nobody is there.
Status dial(const std::string& path, int64_t deadline_ns, Fd* out);
std::vector<char> packet_of(const Request& request, const std::vector<int>& members);
// Sends one request, with a descriptor if it is not negative, and waits for its answer: *reply, and a status with its
// code and words. kUnavailable: the other end has gone; *answered tells it from an answer with that code.
Status converse(int socket, const std::vector<char>& packet, int descriptor, int64_t deadline_ns, Reply* reply,
                std::vector<Fd>* descriptors, bool* answered);
// Says Hello for this member, with the lifeline of this process. `descriptors`: the three of the answer. See
// converse().
Status greet(int socket, int member, const uint8_t* token, int64_t deadline_ns, std::vector<Fd>* descriptors,
             bool* answered);

}  // namespace bagua
