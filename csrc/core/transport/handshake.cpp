#include "transport/handshake.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <type_traits>

#include "base/clock.h"
#include "base/random.h"
#include "base/sha256.h"
#include "net/socket.h"

namespace bagua {
namespace {

constexpr uint32_t kMagic = 0x48554742;         // "BGUH"
constexpr uint32_t kRefusalMagic = 0x56554742;  // "BGUV"

enum class Verdict : uint32_t { kAccepted = 1, kOtherGeneration = 2, kNotProtected = 3, kNoRoomYet = 4 };

// The protection that an end wants: it follows from the end's settings and from the addresses that it sees.
enum class Protection : uint32_t { kPlainOnLoopback = 1, kPlainByChoice = 2, kEncrypted = 3 };

using Nonce = std::array<uint8_t, 32>;

// The wire format is that of memory: all platforms of the core are little-endian.
struct Hello {
  uint32_t magic;
  uint32_t wire;
  uint8_t job[32];  // SHA-256 of the job id
  PeerInfo dialer;
  Protection protection;
  uint32_t fast_aes;  // 1: this processor has AES instructions
  Nonce nonce;
  KeyExchange::Bytes key;  // zeros: no encryption wanted
};
static_assert(sizeof(Hello) == kMostGreeting && std::is_trivially_copyable_v<Hello>);

struct Answer {
  Nonce nonce;
  KeyExchange::Bytes key;
  Protection protection;
  uint32_t fast_aes;
};
static_assert(sizeof(Answer) == 72 && std::is_trivially_copyable_v<Answer>);

// The answer to a Hello of another wire version.
struct Refusal {
  uint32_t magic;
  uint32_t wire;  // of the acceptor
};

// The messages of both ends.
struct Talk {
  Hello hello;
  Answer answer;
};
static_assert(sizeof(Talk) == sizeof(Hello) + sizeof(Answer));

Digest sign(const JobKey& key, const char* label, const Talk& talk, Verdict verdict = {}) {
  HmacSha256 mac(key.data(), key.size());
  mac.update(label, std::strlen(label));
  mac.update(&talk, sizeof talk);
  if (verdict != Verdict()) mac.update(&verdict, sizeof verdict);
  return mac.finish();
}

Status at_step(const char* step, const Status& cause) {
  return {cause.code(), std::string("handshake, ") + step + ": " + cause.message()};
}

Status other_version(uint32_t theirs, uint32_t mine) {
  return {Code::kCorrupt, other_wire_version("handshake: the other host", theirs, mine)};
}

bool same(const Digest& a, const Digest& b) {
  return equal_constant_time(a.data(), b.data(), a.size());
}

Protection wanted(int fd, Encryption encryption) {
  switch (encryption) {
    case Encryption::kNever:
      return Protection::kPlainByChoice;
    case Encryption::kAlways:
      return Protection::kEncrypted;
    case Encryption::kBeyondLoopback:
      break;
  }
  return stays_on_host(fd) ? Protection::kPlainOnLoopback : Protection::kEncrypted;
}

// One end's wishes and keys for protection.
struct Side {
  Protection protection = Protection::kEncrypted;
  uint32_t fast_aes = 0;
  KeyExchange exchange;

  Status open(int fd, const Credentials& credentials) {
    protection = wanted(fd, credentials.encryption);
    if (protection != Protection::kEncrypted) return Status::ok();
    fast_aes = credentials.aes_instructions ? 1 : 0;
    return exchange.open();
  }
};

// Describes how the two differ; empty if they want the same.
std::string disagreement(Protection mine, Protection other) {
  const bool sealed = mine == Protection::kEncrypted;
  if (sealed == (other == Protection::kEncrypted)) return "";
  if (mine == Protection::kPlainByChoice) {
    return "this host's daemon was started with --plain-data, the other one's was not: give it to all hosts or to none";
  }
  if (other == Protection::kPlainByChoice) {
    return "the other host's daemon was started with --plain-data, this one's was not: give it to all hosts or to none";
  }
  return std::string("the connection has a loopback address at ") + (sealed ? "the other" : "this") +
         " end alone: something between the hosts stands in for one of them (a proxy, a forwarded port). Give each "
         "daemon an address of its own with --data-host";
}

// Derives the keys of both directions. `dialed`: this is the dialer's end.
Status make_seals(const Side& side, const JobKey& job_key, const Talk& talk, bool dialed, Seals* seals) {
  Digest secret;
  if (Status status = side.exchange.agree(dialed ? talk.answer.key : talk.hello.key, &secret); !status) {
    return at_step("exchange of keys", status);
  }
  const Digest root = hmac_sha256(job_key.data(), job_key.size(), secret.data(), secret.size());
  const Digest digest = sha256(&talk, sizeof talk);
  const std::string context(reinterpret_cast<const char*>(digest.data()), digest.size());
  Digest by_dialer, by_acceptor;
  hkdf_expand(root, "bagua-seal-dial" + context, by_dialer.data(), by_dialer.size());
  hkdf_expand(root, "bagua-seal-accept" + context, by_acceptor.data(), by_acceptor.size());
  const bool aes = talk.hello.fast_aes == 1 && talk.answer.fast_aes == 1;
  const Cipher cipher = aes ? Cipher::kAes256Gcm : Cipher::kChaCha20Poly1305;
  seals->out = std::make_unique<Sealer>();
  seals->in = std::make_unique<Opener>();
  Status status = seals->out->open(cipher, dialed ? by_dialer : by_acceptor);
  if (status) status = seals->in->open(cipher, dialed ? by_acceptor : by_dialer);
  for (Digest* key : {&secret, &by_dialer, &by_acceptor}) explicit_bzero(key->data(), key->size());
  return status;
}

// Sets up the agreed protection. Both ends must have proved that they have the job key.
Status protect(const Side& side, const JobKey& key, const Talk& talk, bool dialed, Seals* seals) {
  const Protection other = dialed ? talk.answer.protection : talk.hello.protection;
  if (const std::string why = disagreement(side.protection, other); !why.empty()) return {Code::kInvalid, why};
  if (side.protection != Protection::kEncrypted) return Status::ok();
  return make_seals(side, key, talk, dialed, seals);
}

}  // namespace

Status dial_handshake(int fd, const Credentials& credentials, const PeerInfo& me, const DialDeadlines& deadlines,
                      Seals* seals) {
  const JobKey& key = credentials.key;
  Side side;
  if (Status status = side.open(fd, credentials); !status) return status;
  Talk talk{{kMagic, credentials.wire, {}, me, side.protection, side.fast_aes, {}, side.exchange.public_key()}, {}};
  const Digest job = sha256(credentials.job_id.data(), credentials.job_id.size());
  std::memcpy(talk.hello.job, job.data(), job.size());
  if (Status status = fill_random(talk.hello.nonce.data(), talk.hello.nonce.size()); !status) return status;
  if (Status status = write_exact(fd, &talk.hello, sizeof talk.hello, deadlines.answer_ns); !status) {
    return at_step("greeting", status);
  }

  Digest mac;
  Status status = read_exact(fd, &talk.answer, sizeof talk.answer, deadlines.answer_ns);
  if (status) status = read_exact(fd, mac.data(), mac.size(), deadlines.answer_ns);
  if (!status) {
    Refusal refusal;
    std::memcpy(&refusal, &talk.answer, sizeof refusal);
    if (refusal.magic == kRefusalMagic) return other_version(refusal.wire, credentials.wire);
    return at_step("waiting for the answer", status);
  }
  if (!same(mac, sign(key, "bagua-accept", talk))) {
    return {Code::kCorrupt, "handshake: the host that answered does not have this job's key"};
  }
  const Digest proof = sign(key, "bagua-dial", talk);
  if (status = write_exact(fd, proof.data(), proof.size(), deadlines.answer_ns); !status) {
    return at_step("sending the proof", status);
  }
  Verdict verdict{};
  status = read_exact(fd, &verdict, sizeof verdict, deadlines.verdict_ns);
  if (status) status = read_exact(fd, mac.data(), mac.size(), deadlines.verdict_ns);
  if (!status) return at_step("waiting to be accepted", status);
  if (!same(mac, sign(key, "bagua-verdict", talk, verdict))) {
    return {Code::kCorrupt, "handshake: the verdict is not the other host's"};
  }
  if (verdict == Verdict::kOtherGeneration) {
    return {Code::kAborted, "handshake: the other host is not in generation " + std::to_string(me.generation)};
  }
  if (verdict == Verdict::kNoRoomYet) {
    return {Code::kLater, "handshake: the other host has no room yet for more communicators that it has not made"};
  }
  if (status = protect(side, key, talk, true, seals); !status || verdict == Verdict::kAccepted) return status;
  return {Code::kInvalid, "handshake: the other host can't protect the connection"};
}

namespace {

void refuse(int fd, uint32_t wire, int64_t deadline_ns) {
  const Refusal refusal{kRefusalMagic, wire};
  if (!write_exact(fd, &refusal, sizeof refusal, deadline_ns)) return;
  ::shutdown(fd, SHUT_WR);
  // Bytes that nobody has read when a socket is closed cost the other end what it has not read itself.
  const int64_t until = std::min(deadline_ns, now_ns() + kNsPerS);
  char rest[1024];
  for (int i = 0; i < 16 && wait_ready(fd, POLLIN, until); ++i) {
    if (::recv(fd, rest, sizeof rest, MSG_DONTWAIT) <= 0) return;
  }
}

bool is_for(const Hello& hello, const Credentials& credentials) {
  const Digest job = sha256(credentials.job_id.data(), credentials.job_id.size());
  return equal_constant_time(job.data(), hello.job, job.size());
}

Status read_hello(int fd, const Credentials& credentials, int64_t deadline_ns, Hello* hello) {
  constexpr size_t kBegin = offsetof(Hello, job);
  char* const bytes = reinterpret_cast<char*>(hello);
  Status status = read_exact(fd, bytes, kBegin, deadline_ns);
  if (status && hello->magic != kMagic) return {Code::kCorrupt, "handshake: the greeting is not of this protocol"};
  if (status && hello->wire != credentials.wire) {
    refuse(fd, credentials.wire, deadline_ns);
    return other_version(hello->wire, credentials.wire);
  }
  if (status) status = read_exact(fd, bytes + kBegin, sizeof *hello - kBegin, deadline_ns);
  if (!status) return at_step("waiting for a greeting", status);
  if (is_for(*hello, credentials)) return Status::ok();
  return {Code::kCorrupt, "handshake: the greeting is for another job"};
}

// Sends the answer, and reads the proof that the other end has the job key, too.
Status answer_hello(int fd, const JobKey& key, const Side& side, int64_t deadline_ns, Talk* talk) {
  Answer& answer = talk->answer;
  answer = {{}, side.exchange.public_key(), side.protection, side.fast_aes};
  if (Status status = fill_random(answer.nonce.data(), answer.nonce.size()); !status) return status;
  Digest mac = sign(key, "bagua-accept", *talk);
  Status status = write_exact(fd, &answer, sizeof answer, deadline_ns);
  if (status) status = write_exact(fd, mac.data(), mac.size(), deadline_ns);
  if (!status) return at_step("answering", status);
  if (status = read_exact(fd, mac.data(), mac.size(), deadline_ns); !status) {
    return at_step("waiting for the proof", status);
  }
  if (same(mac, sign(key, "bagua-dial", *talk))) return Status::ok();
  return {Code::kCorrupt, "handshake: the host that dialled does not have this job's key"};
}

}  // namespace

size_t greeting_length(const void* seen, size_t n, const Credentials& credentials) {
  Hello hello{};
  std::memcpy(&hello, seen, std::min(n, sizeof hello));
  constexpr size_t kBegin = offsetof(Hello, job);
  if (n < kBegin) return std::memcmp(&hello.magic, &kMagic, std::min(n, sizeof kMagic)) == 0 ? kBegin : 0;
  if (hello.magic != kMagic) return 0;
  if (hello.wire != credentials.wire) return kBegin;
  return n >= sizeof hello && !is_for(hello, credentials) ? 0 : sizeof hello;
}

Status accept_handshake(int fd, const Credentials& credentials, uint64_t generation, int64_t deadline_ns,
                        PeerInfo* peer, Seals* seals, const std::function<bool(const PeerInfo&)>& has_room) {
  Talk talk;
  if (Status status = read_hello(fd, credentials, deadline_ns, &talk.hello); !status) return status;
  Side side;
  if (Status status = side.open(fd, credentials); !status) return status;
  if (Status status = answer_hello(fd, credentials.key, side, deadline_ns, &talk); !status) return status;

  *peer = talk.hello.dialer;
  const Status agreed = protect(side, credentials.key, talk, false, seals);
  const Verdict verdict = peer->generation != generation ? Verdict::kOtherGeneration
                          : !agreed                      ? Verdict::kNotProtected
                          : !has_room || has_room(*peer) ? Verdict::kAccepted
                                                         : Verdict::kNoRoomYet;
  const Digest mac = sign(credentials.key, "bagua-verdict", talk, verdict);
  Status status = write_exact(fd, &verdict, sizeof verdict, deadline_ns);
  if (status) status = write_exact(fd, mac.data(), mac.size(), deadline_ns);
  if (!status) return at_step("accepting", status);
  if (verdict == Verdict::kNoRoomYet) return {Code::kLater, "handshake: no room for the connection yet"};
  if (verdict != Verdict::kOtherGeneration) return agreed;
  return {Code::kAborted, "handshake: host " + std::to_string(peer->from) + " is in generation " +
                              std::to_string(peer->generation) + ", this one in " + std::to_string(generation)};
}

}  // namespace bagua
