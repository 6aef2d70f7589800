#include "transport/handshake.h"

#include <cstring>
#include <type_traits>

#include "base/random.h"
#include "base/sha256.h"
#include "net/socket.h"

namespace bagua {
namespace {

constexpr uint32_t kMagic = 0x48554742;  // "BGUH"
constexpr uint32_t kVersion = 2;
constexpr uint32_t kAccepted = 1;
constexpr uint32_t kOtherGeneration = 2;

using Nonce = std::array<uint8_t, 32>;

// On the wire as it lies here. All platforms of the core are little-endian; Frame's header says so too.
struct Hello {
  uint32_t magic;
  uint32_t version;
  uint8_t job[32];  // SHA-256 of the job id
  uint64_t generation;
  uint32_t comm;
  uint32_t from;
  uint32_t to;
  uint32_t stream;
  uint64_t instance;
  uint8_t nonce[32];
};
static_assert(sizeof(Hello) == 104 && std::is_trivially_copyable_v<Hello>);

struct Answer {
  Nonce nonce;
  Digest mac;
};
static_assert(sizeof(Answer) == 64);

Digest sign(const JobKey& key, const char* label, const Hello& hello, const Nonce& nonce) {
  HmacSha256 mac(key.data(), key.size());
  mac.update(label, std::strlen(label));
  mac.update(&hello, sizeof hello);
  mac.update(nonce.data(), nonce.size());
  return mac.finish();
}

Digest sign_accept(const JobKey& key, const Hello& hello, const Nonce& nonce) {
  return sign(key, "bagua-accept", hello, nonce);
}

Digest sign_dial(const JobKey& key, const Hello& hello, const Nonce& nonce) {
  return sign(key, "bagua-dial", hello, nonce);
}

Status at_step(const char* step, const Status& cause) {
  return {cause.code(), std::string("handshake, ") + step + ": " + cause.message()};
}

bool same(const Digest& a, const Digest& b) {
  return equal_constant_time(a.data(), b.data(), a.size());
}

}  // namespace

Status dial_handshake(int fd, const JobKey& key, const std::string& job_id, const PeerInfo& me, int64_t deadline_ns) {
  Hello hello{kMagic, kVersion, {}, me.generation, me.comm, me.from, me.to, me.stream, me.instance, {}};
  const Digest job = sha256(job_id.data(), job_id.size());
  std::memcpy(hello.job, job.data(), job.size());
  if (Status status = fill_random(hello.nonce, sizeof hello.nonce); !status) return status;
  if (Status status = write_exact(fd, &hello, sizeof hello, deadline_ns); !status) return at_step("greeting", status);

  Answer answer;
  if (Status status = read_exact(fd, &answer, sizeof answer, deadline_ns); !status) {
    return at_step("waiting for the answer", status);
  }
  if (!same(answer.mac, sign_accept(key, hello, answer.nonce))) {
    return {Code::kCorrupt, "handshake: the host that answered does not have this job's key"};
  }
  const Digest proof = sign_dial(key, hello, answer.nonce);
  if (Status status = write_exact(fd, proof.data(), proof.size(), deadline_ns); !status) {
    return at_step("sending the proof", status);
  }
  uint32_t verdict = 0;
  if (Status status = read_exact(fd, &verdict, sizeof verdict, deadline_ns); !status) {
    return at_step("waiting to be accepted", status);
  }
  if (verdict == kAccepted) return Status::ok();
  if (verdict == kOtherGeneration) {
    return {Code::kAborted, "handshake: the other host is not in generation " + std::to_string(me.generation)};
  }
  return {Code::kCorrupt, "handshake: the other host answered with a verdict that does not exist"};
}

Status accept_handshake(int fd, const JobKey& key, const std::string& job_id, uint64_t generation, PeerInfo* peer,
                        int64_t deadline_ns) {
  Hello hello;
  if (Status status = read_exact(fd, &hello, sizeof hello, deadline_ns); !status) {
    return at_step("waiting for a greeting", status);
  }
  if (hello.magic != kMagic) return {Code::kCorrupt, "handshake: the greeting is not of this protocol"};
  if (hello.version != kVersion) {
    return {Code::kCorrupt, "handshake: the other host speaks version " + std::to_string(hello.version) +
                                ", this one version " + std::to_string(kVersion) + ": install the same release"};
  }
  const Digest job = sha256(job_id.data(), job_id.size());
  if (!equal_constant_time(job.data(), hello.job, job.size())) {
    return {Code::kCorrupt, "handshake: the greeting is for another job"};
  }
  Answer answer;
  if (Status status = fill_random(answer.nonce.data(), answer.nonce.size()); !status) return status;
  answer.mac = sign_accept(key, hello, answer.nonce);
  if (Status status = write_exact(fd, &answer, sizeof answer, deadline_ns); !status)
    return at_step("answering", status);

  Digest proof;
  if (Status status = read_exact(fd, proof.data(), proof.size(), deadline_ns); !status) {
    return at_step("waiting for the proof", status);
  }
  if (!same(proof, sign_dial(key, hello, answer.nonce))) {
    return {Code::kCorrupt, "handshake: the host that dialled does not have this job's key"};
  }
  *peer = {hello.generation, hello.comm, hello.from, hello.to, hello.stream, hello.instance};
  const bool current = hello.generation == generation;
  const uint32_t verdict = current ? kAccepted : kOtherGeneration;
  if (Status status = write_exact(fd, &verdict, sizeof verdict, deadline_ns); !status) {
    return at_step("accepting", status);
  }
  if (current) return Status::ok();
  return {Code::kAborted, "handshake: host " + std::to_string(hello.from) + " is in generation " +
                              std::to_string(hello.generation) + ", this one in " + std::to_string(generation)};
}

}  // namespace bagua
