// Engines of one to five hosts with ranks as threads: every kind of operation, and the ways to end. What the sanitizers
// watch.
#include "engine/job/engine.h"

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/clock.h"
#include "channel/client.h"
#include "codec/codec.h"
#include "engine_rig.h"
#include "net/socket.h"

namespace bagua {
namespace {

using test::expect;
using test::fill;
using test::Job;
using test::Rank;

void every_kind(Rank* rank, int n, uint64_t count) {
  const float all = static_cast<float>(n), ranks = all * (all - 1) / 2;
  fill(rank, count * static_cast<uint64_t>(n));
  CHECK_OK(rank->run(Kind::kBarrier, 0));
  CHECK_OK(rank->run(Kind::kAllReduce, count));
  expect(rank->dst(), count, ranks, all);
  CHECK_OK(rank->run(Kind::kBroadcast, count, n - 1));
  expect(rank->dst(), count, all - 1, 1);
  CHECK_OK(rank->run(Kind::kReduce, count, 1));
  if (rank->rank() == 1) expect(rank->dst(), count, ranks, all);
  CHECK_OK(rank->run(Kind::kAllGather, count));
  for (int r = 0; r < n; ++r) expect(rank->dst() + static_cast<uint64_t>(r) * count, count, static_cast<float>(r), 1);
  CHECK_OK(rank->run(Kind::kReduceScatter, count));
  if (count % 16 == 0) expect(rank->dst(), count, ranks, all);
  CHECK_OK(rank->run(Kind::kGather, count, 0));
  CHECK_OK(rank->run(Kind::kScatter, count, 0));
  if (count % 16 == 0) expect(rank->dst(), count, 0, 1);
  CHECK_OK(rank->run(Kind::kAllToAll, count));
  uint64_t send = 0, recv = 0;
  CHECK_OK(rank->start(Kind::kSend, count, (rank->rank() + 1) % n, &send));
  CHECK_OK(rank->start(Kind::kRecv, count, (rank->rank() + n - 1) % n, &recv));
  CHECK_OK(rank->wait(send));
  CHECK_OK(rank->wait(recv));
  expect(rank->dst(), count, static_cast<float>((rank->rank() + n - 1) % n), 1);
}

}  // namespace

TEST(every_kind_on_one_host) {
  Job job({{0, 1, 2}}, 65536);
  job.each([](Rank& rank) {
    for (const uint64_t count : {1, 33, 40'000}) every_kind(&rank, 3, count);
  });
}

TEST(a_large_message_between_two_ranks_of_a_host) {
  Job job({{0, 1}}, 65536);
  job.each([](Rank& rank) {
    constexpr uint64_t kCount = 200'003;  // of floats: more than one thread copies at once
    fill(&rank, kCount);
    uint64_t send = 0, recv = 0;
    CHECK_OK(rank.start(Kind::kSend, kCount, 1 - rank.rank(), &send));
    CHECK_OK(rank.start(Kind::kRecv, kCount, 1 - rank.rank(), &recv));
    CHECK_OK(rank.wait(send));
    CHECK_OK(rank.wait(recv));
    expect(rank.dst(), kCount, static_cast<float>(1 - rank.rank()), 1);
  });
}

TEST(every_kind_on_two_hosts_encrypted) {
  Job job({{0, 1}, {2}}, 4096, true, Encryption::kAlways);
  job.each([](Rank& rank) {
    for (const uint64_t count : {1, 160, 20'000}) every_kind(&rank, 3, count);
  });
  for (size_t host = 0; host < 2; ++host) {
    EXPECT_EQ(job.engine(host).error(), std::string());
    const Counters& counters = job.engine(host).counters();
    EXPECT(counters.bytes_encrypted.load() > 100'000);
    EXPECT_EQ(counters.bytes_encrypted.load(), counters.bytes_sent.load());
  }
}

// The same bits on every rank; operations that share a residual take their turns, however many are in flight.
TEST(every_codec_on_two_hosts) {
  constexpr uint64_t kCount = 5000;
  constexpr int kSteps = 4;
  Job job({{0, 1}, {2}});
  std::mutex mutex;
  std::vector<std::vector<float>> results;  // all that any rank got in the end, by codec
  results.resize(kCodecs);
  job.each([&](Rank& rank) {
    for (uint64_t i = 0; i < kCount; ++i) {
      rank.src()[i] = static_cast<float>((i * 7919 + static_cast<uint64_t>(rank.rank()) * 104729) % 1000) / 500 - 1;
    }
    for (int codec = 1; codec < kCodecs; ++codec) {
      for (const bool one_by_one : {true, false}) {
        const uint32_t residual = static_cast<uint32_t>(2 * codec + (one_by_one ? 0 : 1));
        std::vector<uint64_t> tickets(kSteps);
        for (uint64_t& ticket : tickets) {
          CHECK_OK(rank.start_encoded(kCount, static_cast<Codec>(codec), residual, &ticket));
          if (one_by_one) CHECK_OK(rank.wait(ticket));
        }
        for (const uint64_t ticket : tickets) {
          if (!one_by_one) CHECK_OK(rank.wait(ticket));
        }
        std::lock_guard<std::mutex> lock(mutex);
        std::vector<float>& known = results[static_cast<size_t>(codec)];
        if (known.empty()) known.assign(rank.dst(), rank.dst() + kCount);
        CHECK_EQ(memcmp(known.data(), rank.dst(), kCount * sizeof(float)), 0);
      }
    }
  });
  EXPECT_EQ(job.engine(0).error(), std::string());
  EXPECT(job.engine(0).counters().residual_bytes >= 2 * (kCodecs - 1) * kCount * sizeof(float));
  job.close();
  EXPECT_EQ(job.engine(0).counters().residual_bytes.load(), uint64_t{0});
}

// For any ring, all ranks have the same bits, in the world and in communicators that leave hosts out.
TEST(every_kind_on_four_hosts) {
  constexpr uint64_t kCount = 30'000;
  std::mutex mutex;
  std::vector<float> known[2];
  Job job({{0}, {1, 2}, {3}, {4}, {5}}, 4096);
  job.each([&](Rank& rank) {
    for (const uint64_t count : {1, 160, 20'000}) every_kind(&rank, 6, count);
    for (uint32_t comm = 0; comm < 2; ++comm) {
      if (comm == 1 && rank.rank() == 0) break;
      if (comm == 1) CHECK_OK(rank.client().create_comm(1, {1, 2, 3, 4, 5}, 10 * kNsPerS));
      for (uint64_t i = 0; i < kCount; ++i) {
        rank.src()[i] = 1.0f / static_cast<float>(1 + i % 97 + 31 * static_cast<uint64_t>(rank.rank()));
      }
      CHECK_OK(rank.run(Kind::kAllReduce, kCount, -1, comm));
      std::lock_guard<std::mutex> lock(mutex);
      if (known[comm].empty()) known[comm].assign(rank.dst(), rank.dst() + kCount);
      CHECK_EQ(memcmp(known[comm].data(), rank.dst(), kCount * sizeof(float)), 0);
    }
  });
  const std::string told = job.ring(0);
  EXPECT(told.find("ring order 0 ") == 0 && told.find("slowest link ") != std::string::npos);
  for (size_t host = 1; host < 5; ++host) EXPECT_EQ(job.ring(host), told);
  EXPECT_EQ(job.engine(0).error(), std::string());
}

// Hosts that go at any moment of the measurement. Those that stay can work without them.
TEST(a_host_leaves_while_the_ring_is_measured) {
  for (int round = 0; round < 6; ++round) {
    Job job({{0}, {1}, {2}, {3}, {4}}, 4096);
    // A host that is gone before all are connected fails the job; the first thing that host 0 says follows that.
    while (job.engine(0).counters().bytes_sent == 0) usleep(200);
    usleep(static_cast<unsigned>(3000 * round));
    job.engine(4).close();
    job.each(
        [](Rank& rank) {
          CHECK_OK(rank.client().create_comm(1, {0, 1, 2, 3}, 10 * kNsPerS));
          fill(&rank, 20'000);
          CHECK_OK(rank.run(Kind::kAllReduce, 20'000, -1, 1));
          expect(rank.dst(), 20'000, 6, 4);
        },
        4);
    for (size_t host = 0; host < 4; ++host) EXPECT_EQ(job.engine(host).error(), std::string());
  }
}

TEST(close_while_the_ring_is_measured) {
  for (int round = 0; round < 4; ++round) {
    Job job({{0}, {1}, {2}, {3}}, 4096);
    usleep(static_cast<unsigned>(3000 * round));
  }
}

TEST(abort_while_the_ring_is_measured) {
  for (size_t round = 0; round < 4; ++round) {
    Job job({{0}, {1}, {2}, {3}}, 4096);
    while (job.engine(0).counters().bytes_sent == 0) usleep(200);  // it follows that all are connected
    usleep(static_cast<unsigned>(2000 * round));
    job.engine(round).abort("enough");
    const int64_t deadline = now_ns() + 20 * kNsPerS;
    for (size_t host = 0; host < 4; ++host) {
      while (job.engine(host).error().empty() && now_ns() < deadline) usleep(500);
      CHECK_EQ(job.engine(host).error(), std::string("enough"));
    }
  }
}

TEST(many_in_flight) {
  Job job({{0, 1}, {2, 3}});
  job.each([](Rank& rank) {
    std::vector<uint64_t> tickets(300);
    for (uint64_t& ticket : tickets) CHECK_OK(rank.start(Kind::kAllReduce, 3000, -1, &ticket));
    for (const uint64_t ticket : tickets) CHECK_OK(rank.wait(ticket));
  });
}

TEST(hosts_that_connect_wait_for_descriptors) {
  Job job({{0}, {1}}, 4096);
  job.each([](Rank& rank) { CHECK_OK(rank.run(Kind::kBarrier, 0)); });  // so all connections of the job are made
  const auto told = [&job] {
    const std::vector<Event> events = job.engine(0).events();
    return std::count_if(events.begin(), events.end(),
                         [](const Event& event) { return event.kind == std::string("scarce"); });
  };
  std::string host;
  uint16_t port = 0;
  CHECK_OK(parse_address(job.engine(0).address(), &host, &port));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const Fd stranger(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  {
    const test::NoDescriptors none;
    CHECK_EQ(::connect(stranger.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
    const int64_t deadline = now_ns() + 60 * kNsPerS;
    while (told() == 0) {
      CHECK(now_ns() < deadline);
      ::usleep(1000);
    }
    EXPECT(test::busy_share() < 0.2);
    EXPECT_EQ(told(), 0);  // it was said
  }
  const std::string garbage(4096, 'x');
  CHECK_OK(write_exact(stranger.get(), garbage.data(), garbage.size(), now_ns() + 60 * kNsPerS));
  const int64_t deadline = now_ns() + 60 * kNsPerS;
  while (job.engine(0).counters().bad_connections == 0) {  // it is accepted, and read
    CHECK(now_ns() < deadline);
    ::usleep(1000);
  }
}

TEST(abort_ends_every_wait) {
  Job job({{0, 1}, {2}});
  std::atomic<int> waiting{0};
  test::Threads aborter;
  aborter.start([&] {
    while (waiting.load() < 2 || job.engine(0).waiting(0).empty()) usleep(1000);
    job.engine(1).abort("enough");
  });
  job.each([&](Rank& rank) {
    CHECK_OK(rank.run(Kind::kAllReduce, 5000));
    if (rank.rank() == 1) {
      while (rank.client().error().empty()) usleep(1000);
      return;
    }
    ++waiting;
    CHECK_EQ(rank.run(Kind::kAllReduce, 5000).message(), std::string("enough"));
  });
}

TEST(lost_rank_ends_every_wait) {
  Job job({{0, 1}, {2}});
  std::atomic<int> passed{0};
  job.each([&](Rank& rank) {
    CHECK_OK(rank.run(Kind::kBarrier, 0));
    ++passed;
    if (rank.rank() == 2) {
      // The news of a death may overtake the last message of the barrier.
      while (passed.load() < 3) usleep(500);
      return rank.die();
    }
    CHECK(!rank.run(Kind::kAllReduce, 100'000));
  });
}

TEST(close_while_busy) {
  for (int round = 0; round < 3; ++round) {
    Job job({{0, 1}, {2}});
    std::atomic<int> running{0};
    test::Threads closer;
    closer.start([&] {
      while (running.load() < 3) usleep(500);
      job.close();
    });
    job.each([&](Rank& rank) {
      ++running;
      while (rank.run(Kind::kAllReduce, 60'000)) {
      }
    });
    closer.join();
  }
}

}  // namespace bagua
