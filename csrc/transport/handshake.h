// Who is at the other end of a new TCP connection: decided before a byte of payload is read.
//
// dialer -> acceptor  Hello: magic, version, SHA-256 of the job id, generation, communicator, from host, to host,
// stream, nonce acceptor -> dialer  nonce, HMAC(job key, "bagua-accept" | hello | nonce) dialer -> acceptor  HMAC(job
// key, "bagua-dial" | hello | nonce)       (the hello holds the dialer's nonce) acceptor -> dialer  verdict: accepted,
// or another generation All fields little-endian and of fixed size; anything else closes the connection. The key never
// travels.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "base/status.h"

namespace bagua {

using JobKey = std::array<uint8_t, 32>;

struct PeerInfo {
  uint64_t generation = 0;
  uint32_t comm = 0;
  uint32_t from = 0;  // host index in the job (not in the communicator)
  uint32_t to = 0;
  uint32_t stream = 0;
  uint64_t instance = 0;  // of the communicator: one number may serve several, one after the other
};

Status dial_handshake(int fd, const JobKey& key, const std::string& job_id, const PeerInfo& me, int64_t deadline_ns);
// Fills `peer`. kAborted: right key, but another generation than `generation` (drop and count). kCorrupt: not one of
// us.
Status accept_handshake(int fd, const JobKey& key, const std::string& job_id, uint64_t generation, PeerInfo* peer,
                        int64_t deadline_ns);

}  // namespace bagua
