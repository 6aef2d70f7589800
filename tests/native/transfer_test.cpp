// Transfers of ranks (threads here) through a real engine: tensors in ordinary and in shared memory, in pieces, ranks
// that are ahead of others, and memory that a rank scribbled on.
#include "channel/transfer.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "engine/engine_rig.h"

namespace bagua {
namespace {

constexpr uint64_t kMiB = 1 << 20;

using test::Job;

// A body that also gets the rank's pool of stages.
template <class F>
auto staged(F body) {
  return [body](test::Rank& rank) {
    StagePool pool(&rank.client());
    body(rank.rank(), &rank.client(), &pool);
  };
}

TransferRequest request(Kind kind, uint64_t count, const float* src, float* dst, int root = -1) {
  TransferRequest made;
  made.descriptor.kind = static_cast<uint8_t>(kind);
  made.descriptor.count = count;
  made.descriptor.root = root;
  made.src = reinterpret_cast<const char*>(src);
  made.dst = reinterpret_cast<char*>(dst);
  made.together = kind == Kind::kAllReduce || dst == nullptr;
  return made;
}

Status run(ChannelClient* client, StagePool* pool, const TransferRequest& wanted) {
  Transfer transfer(client, pool, wanted);
  return transfer.run(now_ns() + 60 * kNsPerS, nullptr);
}

float value(int rank, uint64_t i) {
  return static_cast<float>(rank + 1) + static_cast<float>(i % 1021);
}

void check_sum(const float* values, uint64_t count, int ranks) {
  const float n = static_cast<float>(ranks);
  for (uint64_t i = 0; i < count; ++i) CHECK_EQ(values[i], n * (n + 1) / 2 + n * static_cast<float>(i % 1021));
}

}  // namespace

TEST(copies_past_the_caches_are_copies) {
  std::vector<char> from(5000), to(5000);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<char>(i * 7);
  for (const size_t bytes : {0, 1, 63, 64, 255, 256, 257, 4001}) {
    for (const size_t offset : {0, 1, 63}) {
      std::fill(to.begin(), to.end(), 0);
      copy_streaming(to.data() + offset, from.data() + 3, bytes);
      CHECK(memcmp(to.data() + offset, from.data() + 3, bytes) == 0);
      CHECK(to[offset + bytes] == 0 && (offset == 0 || to[offset - 1] == 0));
    }
  }
}

// Rank 0 in shared memory, rank 1 in ordinary memory and in place, rank 2 from one to the other.
TEST(ordinary_and_shared_memory_meet) {
  Job job({{0, 1, 2}}, 512 << 10);
  job.each(staged([](int rank, ChannelClient* client, StagePool* pool) {
    for (const uint64_t count : {uint64_t{1}, uint64_t{1000}, kMiB / 4, kMiB / 4 + 1, 3 * kMiB + 77}) {
      ChannelClient::Allocation shared;
      CHECK_OK(client->alloc(count * 4 + 4, &shared));
      std::vector<float> ordinary(count, -1);
      float* const there = reinterpret_cast<float*>(shared.memory->data()) + 1;
      float* const src = rank == 0 ? there : ordinary.data();
      float* const dst = rank == 1 ? ordinary.data() : there;
      for (uint64_t i = 0; i < count; ++i) src[i] = value(rank, i);
      CHECK_OK(run(client, pool, request(Kind::kAllReduce, count, src, dst)));
      check_sum(dst, count, 3);
      CHECK_OK(
          run(client, pool,
              request(Kind::kBroadcast, count, rank == 2 ? dst : nullptr, rank == 2 ? nullptr : ordinary.data(), 2)));
      if (rank != 2) check_sum(ordinary.data(), count, 3);
      CHECK_OK(client->free_segment(shared.id));
    }
  }));
  EXPECT_EQ(job.engine(0).error(), std::string());
}

TEST(rows_are_staged_whole) {
  Job job({{0, 1}}, 512 << 10);
  job.each(staged([](int rank, ChannelClient* client, StagePool* pool) {
    const uint64_t count = kMiB / 2;
    std::vector<float> own(count), all(2 * count);
    for (uint64_t i = 0; i < count; ++i) own[i] = value(rank, i);
    TransferRequest wanted = request(Kind::kAllGather, count, own.data(), all.data());
    wanted.dst_rows = 2;
    CHECK_OK(run(client, pool, wanted));
    for (uint64_t i = 0; i < count; ++i) CHECK(all[i] == value(0, i) && all[count + i] == value(1, i));
    CHECK_OK(run(client, pool, request(Kind::kBarrier, 0, nullptr, nullptr)));
  }));
}

TEST(stages_are_kept_and_bounded) {
  Job job({{0, 1}}, 512 << 10);
  job.each(staged([](int, ChannelClient* client, StagePool* pool) {
    std::vector<float> data(8 * kMiB, 1), all(16 * kMiB);
    const auto held = [&] {  // by both
      CHECK_OK(run(client, pool, request(Kind::kBarrier, 0, nullptr, nullptr)));
      const uint64_t bytes = client->counters()->segment_bytes.load();
      CHECK_OK(run(client, pool, request(Kind::kBarrier, 0, nullptr, nullptr)));
      return bytes;
    };
    const uint64_t before = held();
    CHECK_OK(run(client, pool, request(Kind::kAllReduce, data.size(), data.data(), data.data())));
    const uint64_t kept = held() - before;
    CHECK(kept > 0 && kept <= 16 * kMiB);
    CHECK_OK(run(client, pool, request(Kind::kAllReduce, data.size(), data.data(), data.data())));
    CHECK_EQ(held() - before, kept);
    TransferRequest gather = request(Kind::kAllGather, data.size(), data.data(), all.data());
    gather.dst_rows = 2;
    CHECK_OK(run(client, pool, gather));
    CHECK(held() - before <= 32 * kMiB);
  }));
}

TEST(a_transfer_goes_on_after_a_timeout_and_ends_with_the_engine) {
  Job job({{0, 1}}, 512 << 10);
  std::atomic<bool> late{false};
  job.each(staged([&](int rank, ChannelClient* client, StagePool* pool) {
    std::vector<float> data(2 * kMiB, 1);
    if (rank == 1) {
      while (!late.load()) usleep(1000);
      CHECK_OK(run(client, pool, request(Kind::kAllReduce, data.size(), data.data(), data.data())));
      CHECK_OK(run(client, pool, request(Kind::kBarrier, 0, nullptr, nullptr)));
      job.engine(0).abort("enough");
      return;
    }
    Transfer transfer(client, pool, request(Kind::kAllReduce, data.size(), data.data(), data.data()));
    CHECK(transfer.run(now_ns() + kNsPerMs, nullptr).code() == Code::kTimeout);
    late.store(true);
    CHECK_OK(transfer.run(-1, nullptr));
    CHECK_EQ(data.back(), 2.0f);
    CHECK_OK(run(client, pool, request(Kind::kBarrier, 0, nullptr, nullptr)));
    const Status status = run(client, pool, request(Kind::kAllReduce, data.size(), data.data(), data.data()));
    CHECK_EQ(status.message(), std::string("enough"));
  }));
}

// Small collectives of ranks that come in time are done without the daemon, wherever tensors lie; the others with it.
TEST(small_ones_need_no_daemon) {
  constexpr uint32_t kOperations = 300;
  Job job({{0, 1, 2}}, 512 << 10);
  std::atomic<uint32_t> before{0}, after{0};
  job.each(staged([&](int rank, ChannelClient* client, StagePool* pool) {
    const char* const counters = reinterpret_cast<const char*>(client->counters());
    const JobPage* const page = reinterpret_cast<const JobPage*>(counters - offsetof(JobPage, counters));
    const auto barrier = [&] { CHECK_OK(run(client, pool, request(Kind::kBarrier, 0, nullptr, nullptr))); };
    barrier();
    if (rank == 0) before.store(page->doorbell.load());
    barrier();
    std::vector<float> data(1000);
    for (uint32_t n = 0; n < kOperations; ++n) {
      const uint64_t count = 1 + n * 3 % data.size();
      for (uint64_t i = 0; i < count; ++i) data[i] = value(rank, i);
      CHECK_OK(run(client, pool, request(Kind::kAllReduce, count, data.data(), data.data())));
      check_sum(data.data(), count, 3);
    }
    barrier();
    if (rank == 0) after.store(page->doorbell.load());
    barrier();
  }));
  // On a busy machine a rank may come too late for some. Each that the daemon does rings at least once.
  EXPECT(after.load() - before.load() < kOperations / 2);
  EXPECT(job.engine(0).counters().ops.load() >= kOperations);
  EXPECT_EQ(job.engine(0).error(), std::string());
}

// A small collective is done when those before it on its communicator are, though the daemon has these.
TEST(a_barrier_comes_behind_what_the_daemon_works_at) {
  Job job({{0, 1}}, 512 << 10);
  job.each(staged([](int rank, ChannelClient* client, StagePool* pool) {
    ChannelClient::Allocation shared;
    CHECK_OK(client->alloc(32 * kMiB, &shared));
    Descriptor large{};
    large.kind = static_cast<uint8_t>(Kind::kAllReduce);
    large.count = 8 * kMiB;
    large.src_segment = large.dst_segment = static_cast<uint32_t>(shared.id);
    for (int turn = 0; turn < 4; ++turn) {
      uint64_t ticket = 0;
      if (turn % 2 == rank) usleep(20'000);  // one is ahead
      CHECK_OK(client->submit(large, &ticket));
      CHECK_OK(run(client, pool, request(Kind::kBarrier, 0, nullptr, nullptr)));
      bool done = false;
      CHECK_OK(client->done(ticket, &done));
      CHECK(done);
      ChannelClient::Times times;
      CHECK_OK(client->wait(ticket, now_ns() + 60 * kNsPerS, nullptr, &times));
    }
    Descriptor small = large;  // one rank has often seen the end of these, and the other one has not
    small.count = 16;
    for (int turn = 0; turn < 300; ++turn) {
      uint64_t ticket = 0;
      ChannelClient::Times times;
      CHECK_OK(client->submit(small, &ticket));
      if (turn % 3 == rank) CHECK_OK(client->wait(ticket, now_ns() + 60 * kNsPerS, nullptr, &times));
      std::vector<float> data(17);
      for (uint64_t i = 0; i < data.size(); ++i) data[i] = value(rank, i);
      CHECK_OK(run(client, pool, request(Kind::kAllReduce, data.size(), data.data(), data.data())));
      check_sum(data.data(), data.size(), 2);
      if (turn % 3 != rank) CHECK_OK(client->wait(ticket, now_ns() + 60 * kNsPerS, nullptr, &times));
    }
  }));
  EXPECT_EQ(job.engine(0).error(), std::string());
}

// Ranks take turns at being ahead by several operations.
TEST(ranks_ahead_of_others) {
  Job job({{0, 1, 2}}, 512 << 10);
  job.each(staged([](int rank, ChannelClient* client, StagePool* pool) {
    ChannelClient::Allocation shared;
    CHECK_OK(client->alloc(4096, &shared));
    Descriptor descriptor{};
    descriptor.kind = static_cast<uint8_t>(Kind::kAllReduce);
    descriptor.count = 16;
    descriptor.src_segment = descriptor.dst_segment = static_cast<uint32_t>(shared.id);
    ChannelClient::Times times;
    for (int round = 0; round < 60; ++round) {
      std::vector<uint64_t> tickets(round % 3 == rank ? 20 : 20 - static_cast<size_t>(rank));
      for (uint64_t& ticket : tickets) CHECK_OK(client->submit(descriptor, &ticket));
      for (size_t more = tickets.size(); more < 20; ++more) {
        uint64_t ticket = 0;
        CHECK_OK(client->submit(descriptor, &ticket));
        tickets.push_back(ticket);
      }
      for (const uint64_t ticket : tickets) CHECK_OK(client->wait(ticket, now_ns() + 60 * kNsPerS, nullptr, &times));
    }
    CHECK_OK(run(client, pool, request(Kind::kBarrier, 0, nullptr, nullptr)));
  }));
  EXPECT_EQ(job.engine(0).error(), std::string());
}

// Each communicator has a room of its own: two threads of a rank are in different ones, and the daemon sees neither.
// The number may be used again, whichever rank is first.
TEST(ranks_meet_on_every_communicator_inside_the_host) {
  Job job({{0, 1, 2}}, 512 << 10);
  job.each(staged([](int rank, ChannelClient* client, StagePool* pool) {
    for (int use = 0; use < 3; ++use) {
      CHECK_OK(client->create_comm(1, {0, 1, 2}, 10 * kNsPerS));
      CHECK_OK(client->create_comm(2, {0, 1, 2}, 10 * kNsPerS));
      test::Threads threads;
      for (const uint32_t comm : {1u, 2u}) {
        threads.start([=] {
          std::vector<float> data(17);
          for (int turn = 0; turn < 20 + use; ++turn) {
            for (uint64_t i = 0; i < data.size(); ++i) data[i] = value(rank, i);
            TransferRequest sum = request(Kind::kAllReduce, data.size(), data.data(), data.data());
            sum.descriptor.comm = comm;
            CHECK_OK(run(client, pool, sum));
            check_sum(data.data(), data.size(), 3);
          }
        });
      }
      threads.join();
      for (const uint32_t comm : {2u, 1u}) CHECK_OK(client->destroy_comm(comm));
    }
    const auto meets = [client](uint32_t comm) {
      Descriptor small{};
      small.kind = static_cast<uint8_t>(Kind::kAllReduce);
      small.count = 1;
      small.comm = comm;
      char data[4] = {};
      bool tried = false, met = false;
      CHECK_OK(client->meet(small, client->generation(), data, data, nullptr, &tried, &met));
      return tried;
    };
    CHECK(!meets(1));
    for (int again = 0; again < 3; ++again) {  // what is declared again goes on
      CHECK_OK(client->create_comm(1, {0, 1, 2}, 10 * kNsPerS));
      for (int turn = 0; turn < 3; ++turn) {
        std::vector<float> data(17);
        for (uint64_t i = 0; i < data.size(); ++i) data[i] = value(rank, i);
        TransferRequest sum = request(Kind::kAllReduce, data.size(), data.data(), data.data());
        sum.descriptor.comm = 1;
        CHECK_OK(run(client, pool, sum));
        check_sum(data.data(), data.size(), 3);
      }
    }
    CHECK(meets(1));
    if (rank < 2) CHECK_OK(client->create_comm(3, {0, 1}, 10 * kNsPerS));
    CHECK_EQ(meets(3), rank < 2);
    CHECK_OK(client->create_comm(4 + static_cast<uint32_t>(rank), {rank}, 10 * kNsPerS));
    CHECK(meets(4 + static_cast<uint32_t>(rank)));  // alone, with nobody
    CHECK_OK(run(client, pool, request(Kind::kBarrier, 0, nullptr, nullptr)));
  }));
  EXPECT_EQ(job.engine(0).error(), std::string());
  EXPECT(job.engine(0).counters().ops.load() >= 2 * (20 + 21 + 22) + 1);
}

// Communicators that have got no room, and those with too many ranks, are the daemon's.
TEST(more_communicators_than_rooms) {
  constexpr uint32_t kComms = kRooms + 3;
  Job job({{0, 1}}, 512 << 10);
  job.each(staged([](int rank, ChannelClient* client, StagePool* pool) {
    for (uint32_t comm = 1; comm <= kComms; ++comm) CHECK_OK(client->create_comm(comm, {0, 1}, 10 * kNsPerS));
    for (uint32_t turn = 0; turn < 3 * kComms; ++turn) {
      std::vector<float> data(17);
      for (uint64_t i = 0; i < data.size(); ++i) data[i] = value(rank, i);
      TransferRequest sum = request(Kind::kAllReduce, data.size(), data.data(), data.data());
      sum.descriptor.comm = 1 + turn % kComms;
      CHECK_OK(run(client, pool, sum));
      check_sum(data.data(), data.size(), 2);
    }
  }));
  EXPECT_EQ(job.engine(0).error(), std::string());
}

TEST(more_ranks_than_meet) {
  std::vector<int> ranks(kMeetingRanks + 1);
  for (size_t i = 0; i < ranks.size(); ++i) ranks[i] = static_cast<int>(i);
  Job job({ranks}, 512 << 10);
  job.each(staged([&ranks](int rank, ChannelClient* client, StagePool* pool) {
    std::vector<float> data(17);
    for (uint64_t i = 0; i < data.size(); ++i) data[i] = value(rank, i);
    CHECK_OK(run(client, pool, request(Kind::kAllReduce, data.size(), data.data(), data.data())));
    check_sum(data.data(), data.size(), static_cast<int>(ranks.size()));
  }));
  EXPECT_EQ(job.engine(0).error(), std::string());
}

// Two vectors of 8 floats in shared memory, which are summed up in place.
struct Deferred {
  using Defer = ChannelClient::Submission::Defer;

  ChannelClient* const client;
  ChannelClient::Allocation memory;
  Descriptor first{}, second{};
  uint64_t tickets[2] = {0, 0};

  explicit Deferred(ChannelClient* from) : client(from) {
    CHECK_OK(client->alloc(4096, &memory));
    for (Descriptor* one : {&first, &second}) {
      one->kind = static_cast<uint8_t>(Kind::kAllReduce);
      one->count = 8;
      one->src_segment = one->dst_segment = static_cast<uint32_t>(memory.id);
      one->src_offset = one->dst_offset = one == &first ? 0 : 1024;
    }
  }
  float* values(int which) { return reinterpret_cast<float*>(memory.memory->data() + 1024 * which); }
  void fill(float a, float b) {
    std::fill_n(values(0), 8, a);
    std::fill_n(values(1), 8, b);
  }
  void submit(const Descriptor& what, uint64_t* ticket, Defer defer) {
    ChannelClient::Submission how;
    how.defer = defer;
    CHECK_OK(client->submit(what, ticket, how));
  }
  void wait(uint64_t ticket) {
    ChannelClient::Times times;
    CHECK_OK(client->wait(ticket, now_ns() + 60 * kNsPerS, nullptr, &times));
    CHECK(times.submitted_ns <= times.started_ns && times.started_ns <= times.done_ns);
  }
};

// Whatever each of two ranks does with an operation that it may defer, both get both sums.
TEST(deferred_operations_end_like_others) {
  using Defer = ChannelClient::Submission::Defer;
  const std::vector<std::function<void(Deferred*)>> ways = {
      [](Deferred* d) {  // together, as a bucket and its flags
        ChannelClient::Submission how;
        how.defer = Defer::kIfPossible;
        CHECK_OK(d->client->submit({&d->first, &d->second}, d->tickets, how));
        std::vector<ChannelClient::Times> times;
        CHECK_OK(d->client->wait_all({d->tickets[0], d->tickets[1]}, now_ns() + 60 * kNsPerS, nullptr, &times));
        CHECK_EQ(times.size(), 2u);
      },
      [](Deferred* d) {  // the second one later, and waited for first
        d->submit(d->first, &d->tickets[0], Defer::kIfPossible);
        d->submit(d->second, &d->tickets[1], Defer::kBehind);
        d->wait(d->tickets[1]);
        d->wait(d->tickets[0]);
      },
      [](Deferred* d) {  // nothing is deferred
        d->submit(d->first, &d->tickets[0], Defer::kBehind);
        d->submit(d->second, &d->tickets[1], Defer::kNever);
        d->wait(d->tickets[0]);
        d->wait(d->tickets[1]);
      },
      [](Deferred* d) {  // another one follows on the communicator
        d->submit(d->first, &d->tickets[0], Defer::kIfPossible);
        d->submit(d->second, &d->tickets[1], Defer::kNever);
        d->wait(d->tickets[1]);
        d->wait(d->tickets[0]);
      },
      [](Deferred* d) {  // asked for instead of waited for
        d->submit(d->first, &d->tickets[0], Defer::kIfPossible);
        d->submit(d->second, &d->tickets[1], Defer::kBehind);
        for (const uint64_t ticket : d->tickets) {
          bool done = false;
          while (!done) CHECK_OK(d->client->done(ticket, &done));
          d->wait(ticket);
        }
      },
  };
  Job job({{0, 1}}, 512 << 10);
  job.each(staged([&ways](int rank, ChannelClient* client, StagePool*) {
    Deferred deferred(client);
    for (size_t turn = 0; turn < ways.size() * ways.size(); ++turn) {
      deferred.fill(static_cast<float>(turn), static_cast<float>(rank));
      ways[rank == 0 ? turn / ways.size() : turn % ways.size()](&deferred);
      CHECK_EQ(deferred.values(0)[7], static_cast<float>(2 * turn));
      CHECK_EQ(deferred.values(1)[7], 1.0f);
    }
    deferred.fill(1, 1);
    deferred.submit(deferred.first, &deferred.tickets[0], Defer::kIfPossible);
    if (rank == 0) {
      client->abandon(deferred.tickets[0]);  // the other one needs it all the same
    } else {
      deferred.wait(deferred.tickets[0]);
      CHECK_EQ(deferred.values(0)[0], 2.0f);
    }
    deferred.submit(deferred.second, &deferred.tickets[1], Defer::kIfPossible);
    deferred.wait(deferred.tickets[1]);
    CHECK_EQ(deferred.values(1)[0], 2.0f);
  }));
  EXPECT_EQ(job.engine(0).error(), std::string());
}

// A rank that overwrites the arrival counters costs time, not results: the daemon looks by itself.
TEST(scribbled_arrival_counters_cost_only_time) {
  Job job({{0, 1}}, 512 << 10);
  job.each(staged([](int rank, ChannelClient* client, StagePool* pool) {
    CHECK_OK(run(client, pool, request(Kind::kBarrier, 0, nullptr, nullptr)));
    GenerationPage* const page = client->sheet();
    std::vector<float> data(100, 1);
    for (const uint64_t garbage : {uint64_t{0}, UINT64_MAX, uint64_t{7}}) {
      for (std::atomic<uint64_t>& count : page->arrivals[0].submitted) count.store(garbage);
      page->rooms[0].verdict.store(static_cast<uint32_t>(garbage) & ~3u);
      std::fill(data.begin(), data.end(), static_cast<float>(rank));
      CHECK_OK(run(client, pool, request(Kind::kAllReduce, data.size(), data.data(), data.data())));
      CHECK_EQ(data[99], 1.0f);
    }
  }));
}

}  // namespace bagua
