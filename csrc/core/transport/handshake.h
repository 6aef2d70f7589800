// Authenticates both ends of a new TCP connection and agrees on its encryption, before a byte of payload is read.
//
// dialer -> acceptor  Hello: magic, wire version, SHA-256 of the job id, generation, communicator, from host, to host,
//                     stream, protection, fast AES, nonce, X25519 key
// acceptor -> dialer  Answer: nonce, X25519 key, protection, fast AES; HMAC(job key, "bagua-accept" | hello | answer)
// dialer -> acceptor  HMAC(job key, "bagua-dial" | hello | answer)
// acceptor -> dialer  verdict, HMAC(job key, "bagua-verdict" | hello | answer | verdict). What is accepted is kept:
//                     its end means the loss of the host
//
// A Hello of another wire version is answered with a Refusal, and the connection is closed. The first eight bytes of
// Hello and the Refusal are the same in all versions.
//
// All fields are little-endian and of fixed size; an end closes the connection if it gets anything else. The job key is
// never sent. Both ends sign all messages of both, so an attacker in between can't weaken the protection.
//
// Keys of an encrypted connection: HKDF-SHA-256 with the job key as salt and the secret of the X25519 exchange as
// input, expanded with "bagua-seal-dial" or "bagua-seal-accept" and the SHA-256 of hello and answer. So keys belong to
// one job, generation, pair of hosts, stream, connection and direction. An attacker who learns the job key later can't
// decrypt recorded connections (forward secrecy).
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>

#include "base/status.h"
#include "base/wire_version.h"
#include "transport/seal.h"

namespace bagua {

using JobKey = std::array<uint8_t, 32>;

// Which connections are encrypted. Both ends must come to the same decision.
enum class Encryption : uint8_t {
  kBeyondLoopback,  // all connections, unless both addresses are loopback addresses
  kAlways,
  kNever,  // --plain-data
};

// Values that a host uses in all handshakes of a job.
struct Credentials {
  JobKey key{};
  std::string job_id;
  Encryption encryption = Encryption::kBeyondLoopback;
  bool aes_instructions = has_aes_instructions();
  uint32_t wire = wire_version;  // of this process; the other end must have the same
};

// A part of Hello as it lies in memory.
struct PeerInfo {
  uint64_t generation = 0;
  uint32_t comm = 0;
  uint32_t from = 0;  // index of the host in the job, not in the communicator
  uint32_t to = 0;
  uint32_t stream = 0;
  uint64_t instance = 0;  // of the communicator: several may use the same number, one after the other
};

// When the dialer waits no longer.
struct DialDeadlines {
  int64_t answer_ns;
  // From the proof on the acceptor may use the connection: a dialer that gives up then looks like a host that is lost.
  int64_t verdict_ns;
};

// `seals` stay empty if the connection is plain. kInvalid: the two hosts want different protection; the text explains.
// kAborted: right key, but another generation; drop the connection and count it. kCorrupt: the other end does not have
// the key, or another wire version, or the messages were changed on their way. kResource: no libcrypto. kLater: the
// acceptor has no room for the connection yet.
Status dial_handshake(int fd, const Credentials& credentials, const PeerInfo& me, const DialDeadlines& deadlines,
                      Seals* seals);
// The same at the other end; fills `peer`. The dialer must be in generation `generation`. `has_room` is asked when all
// else is right; empty: there always is.
Status accept_handshake(int fd, const Credentials& credentials, uint64_t generation, int64_t deadline_ns,
                        PeerInfo* peer, Seals* seals, const std::function<bool(const PeerInfo&)>& has_room = {});

// Length of the greeting of which `seen` has the first `n` bytes, as far as these tell it: with so many bytes
// accept_handshake() waits for no more of it. 0: it is no greeting of this protocol, or one for another job.
size_t greeting_length(const void* seen, size_t n, const Credentials& credentials);
constexpr size_t kMostGreeting = 144;

}  // namespace bagua
