// Chunks go where they arrive first: a slow stream among fast ones.
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>

#include "mesh_rig.h"

namespace bagua {
namespace {

using test::collect;
using test::in_ms;
using test::pattern;

constexpr int kLongestMs = 200'000;  // no more than a way out: relays of a busy machine pass on a few MB/s

// Bytes that a slow relay and all others together have passed on. The slow one is slow by this count, not by the
// clock: on a busy machine those that do not run are slow, too. When the others have nothing to do it goes on.
struct Passed {
  static constexpr uint64_t kTimesSlower = 60;  // than all others together

  std::atomic<uint64_t> by_others{0}, by_slow{0};
  std::atomic<bool> over{false};  // all has been given to the streams: nobody need be slow any more

  void await_turn(uint64_t bytes) {
    by_slow += bytes;
    for (int ms = 0; ms < 50 && !over && by_others < by_slow * kTimesSlower; ++ms) ::poll(nullptr, 0, 1);
  }
};

// Passes on one direction of a connection with little buffering, at most 20 MB/s, and the other freely.
void relay(int near, int far, bool slow, Passed* passed, uint64_t* bytes) {
  const int small = 16 << 10;
  ::setsockopt(near, SOL_SOCKET, SO_RCVBUF, &small, sizeof small);
  std::vector<char> buffer(slow ? 4 << 10 : 64 << 10);
  int64_t free_at = now_ns();
  for (;;) {
    pollfd items[] = {{near, POLLIN, 0}, {far, POLLIN, 0}};
    if (::poll(items, 2, kLongestMs) <= 0) return;
    if (items[1].revents != 0) {
      const ssize_t got = ::recv(far, buffer.data(), buffer.size(), 0);
      if (got <= 0 || !write_exact(near, buffer.data(), static_cast<size_t>(got), in_ms(kLongestMs))) return;
    }
    if (items[0].revents == 0) continue;
    const ssize_t got = ::recv(near, buffer.data(), buffer.size(), 0);
    if (got <= 0) return;
    *bytes += static_cast<uint64_t>(got);
    if (slow) {
      passed->await_turn(static_cast<uint64_t>(got));
    } else {
      free_at = std::max(free_at, now_ns() - 5 * kNsPerMs) + got * 50;  // ns
      while (now_ns() < free_at) ::poll(nullptr, 0, timeout_ms(free_at));
      passed->by_others += static_cast<uint64_t>(got);
    }
    if (!write_exact(far, buffer.data(), static_cast<size_t>(got), in_ms(kLongestMs))) return;
  }
}

TEST(a_slow_stream_does_not_hold_up_the_others) {
  constexpr size_t kBytes = 64 << 10, kCount = 768;  // enough that all streams are tried
  constexpr int kStreams = 4, kSlow = 1;
  Mesh a(test::mesh_options(0, 2, kStreams)), b(test::mesh_options(1, 2, kStreams));
  std::vector<Fd> middle(2 * kStreams);
  Passed passed;
  std::array<uint64_t, kStreams> bytes{};
  test::Threads threads;
  for (size_t s = 0; s < kStreams; ++s) {
    Fd a_end, b_end;
    test::tcp_pair(&a_end, &middle[2 * s]);
    test::tcp_pair(&middle[2 * s + 1], &b_end);
    a.attach(1, static_cast<int>(s), std::move(a_end));
    b.attach(0, static_cast<int>(s), std::move(b_end));
    threads.start([near = middle[2 * s].get(), far = middle[2 * s + 1].get(), s, &passed, &bytes] {
      relay(near, far, s == kSlow, &passed, &bytes[s]);
    });
  }
  const std::string out = pattern(kBytes, 1);
  std::vector<std::string> in(kCount, std::string(kBytes, '\0'));
  for (uint64_t i = 0; i < kCount; ++i) b.recv(0, 1, i, in[i].data(), kBytes, i);
  for (uint64_t i = 0; i < kCount; ++i) a.send(1, 1, i, out.data(), kBytes, i);
  threads.start([&] {
    std::vector<Mesh::Completion> sent;
    CHECK_OK(collect(&a, kCount, &sent, kLongestMs));
    passed.over = true;
  });
  std::vector<Mesh::Completion> received;
  CHECK_OK(collect(&b, kCount, &received, kLongestMs));
  for (const Fd& socket : middle) ::shutdown(socket.get(), SHUT_RDWR);
  threads.join();
  for (const std::string& bytes : in) EXPECT(bytes == out);
  uint64_t total = 0;
  for (const uint64_t n : bytes) total += n;
  EXPECT_EQ(total, kCount * (kBytes + sizeof(FrameHeader)));
  EXPECT(bytes[kSlow] <= total / 8);  // a quarter if all were treated alike
  for (const uint64_t n : bytes)
    EXPECT(n > 0);  // a relay that does not run for a while is slow, too: no more is certain
}

}  // namespace
}  // namespace bagua
