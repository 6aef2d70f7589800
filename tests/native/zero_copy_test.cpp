// Sends without a copy into the kernel: the ledger of its notifications, and meshes on loopback, where the kernel
// copies on delivery and says so.
#include "transport/zero_copy.h"

#include <sys/mman.h>
#include <sys/socket.h>

#include <algorithm>
#include <ctime>
#include <numeric>

#include "mesh_rig.h"

namespace bagua {
namespace {

using test::collect;
using test::in_ms;
using test::pattern;
using Event = Mesh::Event;
using Cookies = std::vector<uint64_t>;

// Messages of so many calls each; their cookies are 0, 1, ...
ZeroCopyLedger ledger_of(std::initializer_list<int> calls, uint64_t first = 0) {
  ZeroCopyLedger ledger(first);
  uint64_t cookie = 0;
  for (const int count : calls) {
    for (int i = 0; i < count; ++i) ledger.took();
    EXPECT_EQ(ledger.hold(cookie++, 100), count > 0);
  }
  return ledger;
}

Cookies complete(ZeroCopyLedger* ledger, uint32_t first, uint32_t last) {
  Cookies cookies;
  ledger->complete(first, last, &cookies);
  return cookies;
}

TEST(ledger_in_order) {
  ZeroCopyLedger ledger = ledger_of({1, 2, 0, 1});
  EXPECT(ledger.outstanding());
  EXPECT_EQ(ledger.held(), 3u);
  EXPECT(complete(&ledger, 0, 0) == Cookies({0}));
  EXPECT(complete(&ledger, 1, 1).empty());  // half of a message
  EXPECT(complete(&ledger, 2, 2) == Cookies({1}));
  EXPECT(complete(&ledger, 3, 3) == Cookies({3}));  // 2 was copied: nobody waits for it
  EXPECT(!ledger.outstanding());
  EXPECT_EQ(ledger.held(), 0u);
}

TEST(ledger_joined_ranges) {
  ZeroCopyLedger ledger = ledger_of({1, 2, 3, 1});
  EXPECT(complete(&ledger, 0, 3) == Cookies({0, 1}));  // and a third of the next
  EXPECT(complete(&ledger, 4, 6) == Cookies({2, 3}));
}

TEST(ledger_out_of_order) {
  ZeroCopyLedger ledger = ledger_of({2, 2, 2});
  EXPECT(complete(&ledger, 4, 5).empty());
  EXPECT(complete(&ledger, 1, 2).empty());
  EXPECT(complete(&ledger, 0, 0) == Cookies({0}));
  EXPECT(complete(&ledger, 3, 3) == Cookies({1, 2}));
}

TEST(ledger_ignores_what_it_knows_and_what_it_never_gave) {
  ZeroCopyLedger ledger = ledger_of({1, 1, 1});
  EXPECT(complete(&ledger, 0, 0) == Cookies({0}));
  EXPECT(complete(&ledger, 0, 0).empty());  // twice
  EXPECT(complete(&ledger, 3, 900).empty());
  EXPECT(complete(&ledger, 0, 1) == Cookies({1}));  // begins before
  EXPECT(complete(&ledger, 2, 5) == Cookies({2}));  // ends after
  ledger.took();
  EXPECT(ledger.hold(7, 0));  // number 3 was named before it was given
  EXPECT(complete(&ledger, 3, 3) == Cookies({7}));
}

TEST(ledger_numbers_wrap) {
  ZeroCopyLedger ledger = ledger_of({3, 3}, (uint64_t{1} << 32) - 2);
  EXPECT(complete(&ledger, 0, 3) == Cookies{});
  EXPECT(complete(&ledger, 0xfffffffe, 0xffffffff) == Cookies({0, 1}));
  ZeroCopyLedger again = ledger_of({3, 3}, (uint64_t{1} << 32) - 2);
  EXPECT(complete(&again, 0xfffffffe, 1) == Cookies({0}));
}

TEST(ledger_message_complete_before_its_end) {
  ZeroCopyLedger ledger;
  ledger.took();
  EXPECT(complete(&ledger, 0, 0).empty());
  EXPECT(!ledger.hold(1, 0));  // the rest was copied: nobody waits
  ledger.took();
  EXPECT(complete(&ledger, 1, 1).empty());
  ledger.took();
  EXPECT(ledger.hold(2, 0));
  EXPECT(complete(&ledger, 2, 2) == Cookies({2}));
}

TEST(ledger_random_orders) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    std::mt19937 random(seed);
    ZeroCopyLedger ledger(uint64_t{seed} * 0x2fffffff);
    const uint64_t first = uint64_t{seed} * 0x2fffffff;
    std::vector<uint64_t> ends;
    uint64_t next = first;
    for (uint64_t message = 0; message < 20; ++message) {
      for (unsigned calls = 1 + random() % 4; calls > 0; --calls, ++next) ledger.took();
      EXPECT(ledger.hold(message, 0));
      ends.push_back(next);
    }
    std::vector<std::pair<uint64_t, uint64_t>> ranges;
    for (uint64_t at = first; at < next;) {
      const uint64_t end = std::min(next, at + 1 + random() % 5);
      ranges.emplace_back(at, end - 1);
      at = end;
    }
    std::shuffle(ranges.begin(), ranges.end(), random);
    std::vector<bool> seen(next - first, false);
    Cookies told;
    for (const auto& [begin, last] : ranges) {
      for (uint64_t at = begin; at <= last; ++at) seen[at - first] = true;
      ledger.complete(static_cast<uint32_t>(begin), static_cast<uint32_t>(last), &told);
      const auto prefix = static_cast<uint64_t>(std::find(seen.begin(), seen.end(), false) - seen.begin());
      const auto due = std::count_if(ends.begin(), ends.end(), [&](uint64_t end) { return end - first <= prefix; });
      EXPECT_EQ(told.size(), static_cast<size_t>(due));
    }
    Cookies all(20);
    std::iota(all.begin(), all.end(), 0u);
    EXPECT(told == all);
    EXPECT(!ledger.outstanding());
  }
}

// The tests below count on what the kernel may pin for us: RLIMIT_MEMLOCK holds for mlock(2), too.
void need_zero_copy() {
  constexpr size_t kPinned = 32 << 20;
  void* memory = ::mmap(nullptr, kPinned, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  const bool pinned = memory != MAP_FAILED && ::mlock(memory, kPinned) == 0;
  if (memory != MAP_FAILED) ::munmap(memory, kPinned);
  if (!pinned) test::skip("RLIMIT_MEMLOCK is less than 32 MiB");
  Socket a;
  Socket b;
  test::tcp_pair(&a, &b);
  if (!ZeroCopy().enable(a.fd(), ZeroCopyMode::kAlways)) test::skip("the kernel has no SO_ZEROCOPY");
}

// A mesh that sends without copies, and the test as its peer.
struct ZeroCopyPeer : test::RawPeer {
  explicit ZeroCopyPeer(ZeroCopyMode mode = ZeroCopyMode::kAlways) : RawPeer(1, true, options(mode)) {}
  static MeshOptions options(ZeroCopyMode mode) {
    MeshOptions options = test::mesh_options(0, 2, 1);
    options.zero_copy = mode;
    return options;
  }
  std::string read_frame() {
    FrameHeader header;
    CHECK_OK(read_exact(ends[0].fd(), &header, sizeof header, in_ms(5000)));
    std::string payload(header.payload_bytes, '\0');
    CHECK_OK(read_exact(ends[0].fd(), payload.data(), payload.size(), in_ms(5000)));
    EXPECT_EQ(header.header_crc, header.compute_crc());
    return payload;
  }
};

// Two hosts send each other chunks of many sizes; each is overwritten as soon as it is said to be sent.
Mesh::Counters exchange(ZeroCopyMode mode, int streams) {
  constexpr size_t kCount = 60;
  constexpr size_t kWindow = 8;
  const auto size_of = [](size_t i) { return (i * 7919) % 13 * 40'000 + i % 3; };
  std::vector<std::unique_ptr<Mesh>> meshes;
  for (int host = 0; host < 2; ++host) {
    MeshOptions options = test::mesh_options(host, 2, streams);
    options.zero_copy = mode;
    meshes.push_back(std::make_unique<Mesh>(options));
  }
  for (int s = 0; s <= streams; ++s) {
    Socket a;
    Socket b;
    test::tcp_pair(&a, &b);
    meshes[0]->attach(1, s, std::move(a));
    meshes[1]->attach(0, s, std::move(b));
  }
  test::Threads threads;
  for (int host = 0; host < 2; ++host) {
    threads.start([&, host] {
      Mesh& mesh = *meshes[static_cast<size_t>(host)];
      const auto seed = [](int from, size_t i) {
        return static_cast<unsigned>(from * 1000) + static_cast<unsigned>(i);
      };
      std::vector<std::string> out(kCount), in(kCount);
      size_t sent = 0, received = 0, begun = 0;
      std::vector<Mesh::Completion> done;
      while (sent < kCount || received < kCount) {
        for (; begun < kCount && begun < std::min(sent, received) + kWindow; ++begun) {
          out[begun] = pattern(size_of(begun), seed(host, begun));
          in[begun].resize(size_of(begun));
          mesh.recv(1 - host, 1, begun, in[begun].data(), in[begun].size(), begun);
          mesh.send(1 - host, 1, begun, out[begun].data(), out[begun].size(), begun);
        }
        done.clear();
        CHECK_OK(collect(&mesh, 1, &done));
        for (const Mesh::Completion& completion : done) {
          const size_t i = completion.cookie;
          if (completion.event == Event::kSent) {
            std::fill(out[i].begin(), out[i].end(), '#');
            ++sent;
          } else {
            EXPECT(in[i] == pattern(size_of(i), seed(1 - host, i)));
            ++received;
          }
        }
      }
    });
  }
  threads.join();
  return meshes[0]->counters();
}

TEST(bytes_are_right_when_forced) {
  need_zero_copy();
  for (const int streams : {1, 3}) {
    const Mesh::Counters counters = exchange(ZeroCopyMode::kAlways, streams);
    EXPECT(counters.zero_copy_bytes > 0);  // fewer than all where net.core.optmem_max is small
    EXPECT_EQ(counters.zero_copy_off, 0u);
  }
}

TEST(a_kernel_that_copies_is_believed) {
  need_zero_copy();
  const Mesh::Counters counters = exchange(ZeroCopyMode::kAuto, 3);
  EXPECT(counters.zero_copy_bytes > 0);
  EXPECT(counters.zero_copy_bytes < counters.bytes_sent / 2);
  EXPECT(counters.zero_copy_off >= 1 && counters.zero_copy_off <= 3);  // those that carried a large chunk
}

// Under whatever limits this process has.
TEST(bytes_are_right_in_any_case) {
  for (const ZeroCopyMode mode : {ZeroCopyMode::kAuto, ZeroCopyMode::kAlways}) {
    EXPECT(exchange(mode, 2).bytes_sent > 0);
  }
}

TEST(off_by_default) {
  EXPECT_EQ(exchange(test::mesh_options(0, 2, 1).zero_copy, 2).zero_copy_bytes, 0u);
}

TEST(small_chunks_and_control_are_copied) {
  ZeroCopyPeer peer;
  const std::string small = pattern(ZeroCopy::kMinBytes - 1, 1);
  std::vector<Mesh::Completion> done;
  CHECK_OK(peer.mesh.poll(in_ms(1), &done));  // takes the streams: the text goes on the lane
  peer.mesh.send(1, 1, 1, small.data(), small.size(), 5);
  peer.mesh.send_control(1, "text");
  CHECK_OK(collect(&peer.mesh, 1, &done));
  EXPECT(done[0].event == Event::kSent);
  EXPECT(peer.read_frame() == small);
  EXPECT_EQ(peer.mesh.counters().zero_copy_bytes, 0u);
}

// The kernel would join the notifications of chunks that lie in one buffer; see ZeroCopy::send().
TEST(a_chunk_does_not_wait_for_the_next_one) {
  need_zero_copy();
  ZeroCopyPeer peer;
  const int little = 16 << 10;
  const int much = 1 << 20;
  ::setsockopt(peer.ends[0].fd(), SOL_SOCKET, SO_RCVBUF, &little, sizeof little);
  // The first fills what the receiver takes unread, so that the others wait in the sender's socket side by side.
  const std::string filler = pattern(ZeroCopy::kMinBytes - 1, 1);
  const std::string first = pattern(ZeroCopy::kMinBytes, 2);
  const std::string second = pattern(300'000, 3);
  peer.mesh.send(1, 1, 0, filler.data(), filler.size(), 0);
  peer.mesh.send(1, 1, 1, filler.data(), filler.size(), 1);
  peer.mesh.send(1, 1, 2, first.data(), first.size(), 2);
  peer.mesh.send(1, 1, 3, second.data(), second.size(), 3);
  std::vector<Mesh::Completion> done;
  CHECK_OK(collect(&peer.mesh, 2, &done));
  CHECK_OK(peer.mesh.poll(in_ms(50), &done));
  EXPECT_EQ(done.size(), 2u);
  EXPECT(peer.mesh.describe_waits(now_ns()).find("and 2 sends outstanding") != std::string::npos);
  EXPECT(peer.read_frame() == filler);
  EXPECT(peer.read_frame() == filler);
  EXPECT(peer.read_frame() == first);
  CHECK_OK(collect(&peer.mesh, 3, &done));
  EXPECT_EQ(done[2].cookie, 2u);
  CHECK_OK(peer.mesh.poll(in_ms(50), &done));
  EXPECT_EQ(done.size(), 3u);
  test::Threads threads;
  ::setsockopt(peer.ends[0].fd(), SOL_SOCKET, SO_RCVBUF, &much, sizeof much);
  threads.start([&] { EXPECT(peer.read_frame() == second); });
  CHECK_OK(collect(&peer.mesh, 4, &done));
  threads.join();
  EXPECT_EQ(peer.mesh.describe_waits(now_ns()), "");
}

double thread_cpu_s() {
  timespec time{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

// EPOLLERR of the error queue on a stream whose frame waits for its receive: no loss, no spinning.
TEST(notifications_on_a_parked_stream) {
  need_zero_copy();
  ZeroCopyPeer peer;
  const std::string early = pattern(300, 1);
  const std::string chunk = pattern(400'000, 2);
  peer.send(0, 4, 4, early);
  std::vector<Mesh::Completion> done;
  CHECK_OK(peer.mesh.poll(in_ms(20), &done));  // parked
  test::Threads threads;
  threads.start([&] {
    for (int i = 0; i < 5; ++i) EXPECT(peer.read_frame() == chunk);
  });
  for (uint64_t i = 0; i < 5; ++i) peer.mesh.send(1, 1, i, chunk.data(), chunk.size(), i);
  CHECK_OK(collect(&peer.mesh, 5, &done));
  threads.join();
  const double before = thread_cpu_s();
  const int64_t start = now_ns();
  CHECK_OK(peer.mesh.poll(in_ms(300), &done));
  const double waited = static_cast<double>(now_ns() - start) * 1e-9;
  EXPECT(waited > 0.25);
  EXPECT(thread_cpu_s() - before < waited / 4);
  EXPECT_EQ(done.size(), 5u);
  std::string in(early.size(), '\0');
  peer.mesh.recv(1, 4, 4, in.data(), in.size(), 9);
  CHECK_OK(collect(&peer.mesh, 6, &done));
  EXPECT(in == early);
}

TEST(a_stream_that_breaks_with_sends_outstanding) {
  need_zero_copy();
  for (const bool parked : {false, true}) {
    ZeroCopyPeer peer;
    const std::string chunk = pattern(Mesh::kMaxMessage, 1);
    if (parked) peer.send(0, 4, 4, "early");
    peer.mesh.send(1, 1, 1, chunk.data(), chunk.size(), 1);
    std::vector<Mesh::Completion> done;
    CHECK_OK(peer.mesh.poll(in_ms(50), &done));
    EXPECT(done.empty());
    peer.ends.clear();  // with unread bytes: a reset
    const Status status = test::collect_error(&peer.mesh, &done);
    EXPECT(status.code() == Code::kUnavailable);
    EXPECT(status.message().find("lost host 1") != std::string::npos);
    EXPECT(done.empty());  // never said to be sent
  }
}

TEST(what_was_sent_before_the_end_is_told) {
  need_zero_copy();
  ZeroCopyPeer peer;
  const std::string chunk = pattern(200'000, 1);
  peer.mesh.send(1, 1, 1, chunk.data(), chunk.size(), 1);
  std::vector<Mesh::Completion> done;
  test::Threads threads;
  threads.start([&] {
    EXPECT(peer.read_frame() == chunk);
    peer.ends.clear();
  });
  EXPECT(test::collect_error(&peer.mesh, &done).code() == Code::kUnavailable);
  threads.join();
  EXPECT_EQ(done.size(), 1u);
}

}  // namespace
}  // namespace bagua
