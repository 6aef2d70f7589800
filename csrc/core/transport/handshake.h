// Authenticates both ends of a new TCP connection and agrees on its encryption, before a byte of payload is read.
//
// dialer -> acceptor  Hello: magic, version, SHA-256 of the job id, generation, communicator, from host, to host,
//                     stream, protection, fast AES, nonce, X25519 key
// acceptor -> dialer  Answer: nonce, X25519 key, protection, fast AES; HMAC(job key, "bagua-accept" | hello | answer)
// dialer -> acceptor  HMAC(job key, "bagua-dial" | hello | answer)
// acceptor -> dialer  verdict, HMAC(job key, "bagua-verdict" | hello | answer | verdict)
//
// All fields little-endian and of fixed size; anything else closes the connection. The job key never travels. Both
// sides have signed all that either said, so nobody between them can talk them into less than they want.
//
// Keys of an encrypted connection: HKDF-SHA-256 with the job key as salt and the secret of the X25519 exchange as
// input, expanded with "bagua-seal-dial" or "bagua-seal-accept" and the SHA-256 of hello and answer. So they belong to
// this job, generation, pair of hosts, stream, connection and direction, and whoever learns the job key later can't
// read what was recorded before.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "base/status.h"
#include "transport/seal.h"

namespace bagua {

using JobKey = std::array<uint8_t, 32>;

// Which connections are encrypted. The two ends must come to the same.
enum class Encryption : uint8_t {
  kBeyondLoopback,  // all but those whose both addresses are loopback ones
  kAlways,
  kNever,  // --plain-data
};

// One host's part of every handshake of a job.
struct Credentials {
  JobKey key{};
  std::string job_id;
  Encryption encryption = Encryption::kBeyondLoopback;
  bool aes_instructions = has_aes_instructions();
};

struct PeerInfo {
  uint64_t generation = 0;
  uint32_t comm = 0;
  uint32_t from = 0;  // host index in the job (not in the communicator)
  uint32_t to = 0;
  uint32_t stream = 0;
  uint64_t instance = 0;  // of the communicator: one number may serve several, one after the other
};

// `seals` stay empty where the connection is plain. kInvalid: the two hosts want different protection, in words.
// kAborted: right key, but another generation (drop and count). kCorrupt: not one of us, or somebody between has
// changed what was said. kResource: no libcrypto.
Status dial_handshake(int fd, const Credentials& credentials, const PeerInfo& me, int64_t deadline_ns, Seals* seals);
// The same; fills `peer`. The other end must be in generation `generation`.
Status accept_handshake(int fd, const Credentials& credentials, uint64_t generation, int64_t deadline_ns,
                        PeerInfo* peer, Seals* seals);

}  // namespace bagua
