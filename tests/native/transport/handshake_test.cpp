// Handshake: both ends with the right key, with a wrong one, and with peers that talk nonsense.
#include "transport/handshake.h"

#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <random>
#include <vector>

#include "base/clock.h"
#include "harness.h"
#include "net/socket.h"

namespace bagua {
namespace {

constexpr size_t kHello = 144;  // bytes of a greeting
constexpr size_t kAnswer = 104;
constexpr size_t kProof = 32;
constexpr size_t kVerdict = 36;

JobKey key_of(uint8_t fill) {
  JobKey key;
  key.fill(fill);
  return key;
}

struct Pair {
  Fd dialer;
  Fd acceptor;
  Pair() {
    int ends[2];
    CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0);
    dialer = Fd(ends[0]);
    acceptor = Fd(ends[1]);
  }
};

int64_t in_ms(int64_t ms) {
  return now_ns() + ms * kNsPerMs;
}

struct Side {
  Credentials credentials{key_of(1), "job"};
  uint64_t generation = 7;
};

Side side_with(Encryption encryption, bool aes_instructions = true) {
  Side side;
  side.credentials.encryption = encryption;
  side.credentials.aes_instructions = aes_instructions;
  return side;
}

// One end of a handshake that was run.
struct End {
  Status status;
  PeerInfo peer;  // the acceptor's
  Seals seals;
};

struct Outcome {
  End dial;
  End accept;
};

End dial(const Pair& pair, const Side& side, int64_t deadline_ns) {
  End end;
  end.status = dial_handshake(pair.dialer.get(), side.credentials, {side.generation, 3, 1, 2, 5, 6},
                              {deadline_ns, deadline_ns}, &end.seals);
  return end;
}

End accept(const Pair& pair, const Side& side, int64_t deadline_ns) {
  End end;
  end.status =
      accept_handshake(pair.acceptor.get(), side.credentials, side.generation, deadline_ns, &end.peer, &end.seals);
  return end;
}

Outcome meet(const Side& dialer, const Side& acceptor) {
  Pair pair;
  Outcome outcome;
  test::Threads threads;
  threads.start([&] {
    outcome.dial = dial(pair, dialer, in_ms(5000));
    pair.dialer.reset();
  });
  outcome.accept = accept(pair, acceptor, in_ms(5000));
  pair.acceptor.reset();
  threads.join();
  return outcome;
}

TEST(right_key) {
  const Outcome outcome = meet({}, {});
  CHECK_OK(outcome.dial.status);
  CHECK_OK(outcome.accept.status);
  const PeerInfo& peer = outcome.accept.peer;
  EXPECT_EQ(peer.generation, 7u);
  EXPECT_EQ(peer.comm, 3u);
  EXPECT_EQ(peer.from, 1u);
  EXPECT_EQ(peer.to, 2u);
  EXPECT_EQ(peer.stream, 5u);
  EXPECT_EQ(peer.instance, 6u);
}

TEST(wrong_key) {
  Side other;
  other.credentials.key[31] ^= 1;
  const Outcome outcome = meet(other, {});
  EXPECT(outcome.dial.status.code() == Code::kCorrupt);
  test::has(outcome.dial.status, "key");
  EXPECT(!outcome.accept.status);  // the dialer goes away without a proof
}

TEST(dialer_that_ignores_the_answer) {
  // A dialer without the key can't finish, whatever it sends as proof.
  Pair pair;
  End accepted;
  test::Threads threads;
  threads.start([&] {
    accepted = accept(pair, {}, in_ms(5000));
    pair.acceptor.reset();
  });
  Side thief;
  thief.credentials.key = key_of(9);
  // The first message of an honest dialer with a wrong key is right in every field: replay it by hand, with a made-up
  // proof.
  Pair recorder;
  threads.start([&] { EXPECT(!dial(recorder, thief, in_ms(500)).status); });
  char bytes[kHello];
  CHECK_OK(read_exact(recorder.acceptor.get(), bytes, sizeof bytes, in_ms(5000)));
  CHECK_OK(write_exact(pair.dialer.get(), bytes, sizeof bytes, in_ms(5000)));
  char answer[kAnswer];
  CHECK_OK(read_exact(pair.dialer.get(), answer, sizeof answer, in_ms(5000)));
  CHECK_OK(write_exact(pair.dialer.get(), bytes, kProof, in_ms(5000)));
  EXPECT(!read_exact(pair.dialer.get(), bytes, 4, in_ms(5000)));
  recorder.acceptor.reset();
  threads.join();
  EXPECT(accepted.status.code() == Code::kCorrupt);
  test::has(accepted.status, "key");
}

TEST(other_job) {
  Side other;
  other.credentials.job_id = "another";
  const Outcome outcome = meet(other, {});
  EXPECT(!outcome.dial.status);
  EXPECT(outcome.accept.status.code() == Code::kCorrupt);
  test::has(outcome.accept.status, "another job");
}

// Whatever else the messages of another version hold, both ends say why they can't talk.
TEST(other_wire_version) {
  Side other;
  other.credentials.wire = 7;
  for (const bool dialer : {false, true}) {
    const Outcome outcome = dialer ? meet(other, {}) : meet({}, other);
    EXPECT(outcome.dial.status.code() == Code::kCorrupt);
    EXPECT(outcome.accept.status.code() == Code::kCorrupt);
    test::has(outcome.dial.status, dialer ? "other host speaks wire version 0, this one wire version 7"
                                          : "other host speaks wire version 7, this one wire version 0");
    test::has(outcome.accept.status, dialer ? "other host speaks wire version 7, this one wire version 0"
                                            : "other host speaks wire version 0, this one wire version 7");
  }
}

TEST(a_greeting_of_another_size) {
  for (const size_t rest : {0, 8, 400}) {
    Pair pair;
    std::vector<char> bytes(8 + rest, 'x');
    const uint32_t begin[] = {0x48554742, 7};
    memcpy(bytes.data(), begin, sizeof begin);
    CHECK_OK(write_exact(pair.dialer.get(), bytes.data(), bytes.size(), in_ms(1000)));
    ::shutdown(pair.dialer.get(), SHUT_WR);
    test::has(accept(pair, {}, in_ms(5000)).status, "speaks wire version 7");
    uint32_t refusal[2];
    CHECK_OK(read_exact(pair.dialer.get(), refusal, sizeof refusal, in_ms(1000)));
    EXPECT(refusal[0] == 0x56554742 && refusal[1] == 0);
  }
}

TEST(other_generation) {
  Side other;
  other.generation = 6;
  const Outcome outcome = meet(other, {});
  EXPECT(outcome.dial.status.code() == Code::kAborted);
  EXPECT(outcome.accept.status.code() == Code::kAborted);
  test::has(outcome.accept.status, "generation 6");
  EXPECT_EQ(outcome.accept.peer.from, 1u);
}

TEST(an_acceptor_without_room) {
  Pair pair;
  End dialled, accepted;
  PeerInfo asked;
  test::Threads threads;
  threads.start([&] { dialled = dial(pair, {}, in_ms(5000)); });
  const Side side;
  accepted.status = accept_handshake(pair.acceptor.get(), side.credentials, side.generation, in_ms(5000),
                                     &accepted.peer, &accepted.seals, [&](const PeerInfo& peer) {
                                       asked = peer;
                                       return false;
                                     });
  threads.join();
  EXPECT(dialled.status.code() == Code::kLater);
  EXPECT(accepted.status.code() == Code::kLater);
  EXPECT(asked.comm == 3 && asked.instance == 6);
}

TEST(garbage_at_the_acceptor) {
  std::mt19937 random(1);
  for (const size_t size : {0, 1, 4, 95, 143, 144, 145, 200, 100'000}) {
    for (const bool close : {false, true}) {
      Pair pair;
      std::vector<char> bytes(size);
      for (char& byte : bytes) byte = static_cast<char>(random());
      const size_t fits = std::min<size_t>(size, 50'000);
      CHECK_OK(write_exact(pair.dialer.get(), bytes.data(), fits, in_ms(1000)));
      if (close) pair.dialer.reset();
      const int64_t start = now_ns();
      const Status status = accept(pair, {}, in_ms(30)).status;
      EXPECT(!status);
      if (size >= kHello) EXPECT(status.code() == Code::kCorrupt);
      EXPECT(now_ns() - start < 5 * kNsPerS);
    }
  }
}

TEST(garbage_at_the_dialer) {
  for (const size_t size : {0, 3, 64, 104, 1000}) {
    Pair pair;
    const std::vector<char> bytes(size, 'x');
    CHECK_OK(write_exact(pair.acceptor.get(), bytes.data(), size, in_ms(1000)));
    const Status status = dial(pair, {}, in_ms(30)).status;
    EXPECT(status.code() == (size >= kAnswer ? Code::kCorrupt : Code::kTimeout));
  }
}

// ---- somebody in between

// Hands the four messages of a handshake on, one byte of all that is said changed with `change`.
Outcome relayed(const Side& dialer, const Side& acceptor, size_t where, uint8_t change) {
  Pair near, far;
  Outcome outcome;
  test::Threads threads;
  threads.start([&] {
    outcome.dial = dial(near, dialer, in_ms(5000));
    near.dialer.reset();
  });
  threads.start([&] {
    outcome.accept = accept(far, acceptor, in_ms(5000));
    far.acceptor.reset();
  });
  size_t begin = 0;
  bool up = true;  // from the dialer
  for (const size_t length : {kHello, kAnswer, kProof, kVerdict}) {
    const Fd& from = up ? near.acceptor : far.dialer;
    const Fd& to = up ? far.dialer : near.acceptor;
    uint8_t bytes[kHello];
    if (!read_exact(from.get(), bytes, length, in_ms(5000))) break;
    if (where >= begin && where < begin + length) bytes[where - begin] ^= change;
    if (!write_exact(to.get(), bytes, length, in_ms(5000))) break;
    begin += length;
    up = !up;
  }
  far.dialer.reset();
  near.acceptor.reset();
  threads.join();
  return outcome;
}

constexpr size_t kAll = kHello + kAnswer + kProof + kVerdict;

// For any changed byte one end notices, and neither gets a connection that the other does not have.
TEST(no_byte_can_be_changed) {
  for (const Encryption encryption : {Encryption::kNever, Encryption::kAlways}) {
    const Side side = side_with(encryption);
    for (size_t where = 0; where < kAll; ++where) {
      const Outcome outcome = relayed(side, side, where, 1);
      EXPECT(!outcome.dial.status);
      const bool last = where >= kAll - kVerdict;  // the acceptor has said its last word
      EXPECT(last || !outcome.accept.status);
    }
  }
}

// ---- what the two want

bool works(Seals* from, Seals* to) {
  const std::string text = "a gradient";
  std::string sealed(text.size(), '\0'), opened(text.size(), '\0');
  char tag[Sealer::kTagBytes];
  CHECK(from->out->begin() && from->out->update(text.data(), sealed.data(), text.size()) && from->out->end(tag));
  CHECK(to->in->begin() && to->in->update(sealed.data(), opened.data(), text.size()));
  return to->in->end(tag) && opened == text && sealed != text;
}

TEST(seals_fit_in_both_directions) {
  for (const bool dialer_aes : {false, true}) {
    for (const bool acceptor_aes : {false, true}) {
      Outcome outcome = meet(side_with(Encryption::kAlways, dialer_aes), side_with(Encryption::kAlways, acceptor_aes));
      CHECK_OK(outcome.dial.status);
      CHECK_OK(outcome.accept.status);
      EXPECT(works(&outcome.dial.seals, &outcome.accept.seals));
      EXPECT(works(&outcome.accept.seals, &outcome.dial.seals));
    }
  }
}

TEST(every_connection_and_direction_has_keys_of_its_own) {
  Outcome one = meet(side_with(Encryption::kAlways), side_with(Encryption::kAlways));
  Outcome two = meet(side_with(Encryption::kAlways), side_with(Encryption::kAlways));
  EXPECT(!works(&one.dial.seals, &two.accept.seals));
  EXPECT(!works(&one.accept.seals, &two.dial.seals));
  EXPECT(!works(&two.dial.seals, &two.dial.seals));  // what it said itself, sent back
}

TEST(plain_where_both_want_it) {
  for (const Encryption dialer : {Encryption::kBeyondLoopback, Encryption::kNever}) {
    for (const Encryption acceptor : {Encryption::kBeyondLoopback, Encryption::kNever}) {
      const Outcome outcome = meet(side_with(dialer), side_with(acceptor));  // these sockets stay on the host
      CHECK_OK(outcome.dial.status);
      CHECK_OK(outcome.accept.status);
      EXPECT(outcome.dial.seals.out == nullptr && outcome.accept.seals.in == nullptr);
    }
  }
}

TEST(hosts_that_want_different_things_say_so) {
  const struct {
    Encryption dialer, acceptor;
    const char *dialer_says, *acceptor_says;
  } cases[] = {
      {Encryption::kAlways, Encryption::kNever, "the other host's daemon was started with --plain-data",
       "this host's daemon was started with --plain-data"},
      {Encryption::kNever, Encryption::kAlways, "this host's daemon was started with --plain-data",
       "the other host's daemon was started with --plain-data"},
      {Encryption::kAlways, Encryption::kBeyondLoopback, "a loopback address at the other end alone",
       "a loopback address at this end alone"},
      {Encryption::kBeyondLoopback, Encryption::kAlways, "a loopback address at this end alone",
       "a loopback address at the other end alone"},
  };
  for (const auto& one : cases) {
    const Outcome outcome = meet(side_with(one.dialer), side_with(one.acceptor));
    EXPECT(outcome.dial.status.code() == Code::kInvalid);
    EXPECT(outcome.accept.status.code() == Code::kInvalid);
    test::has(outcome.dial.status, one.dialer_says);
    test::has(outcome.accept.status, one.acceptor_says);
  }
}

}  // namespace
}  // namespace bagua
