// An engine whose generation ends and is followed by another one: ranks keep their channels and memory, the port stays,
// and nothing of the old generation is in the new one.
#include <cstring>
#include <filesystem>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "engine_rig.h"

namespace bagua {
namespace {

using test::expect;
using test::fill;
using test::Job;
using test::Rank;

using Hosts = std::vector<std::vector<int>>;

constexpr uint64_t kCount = 30'000;

// Ranks that live as long as the test, each with a thread of its own for every body.
class Members {
 public:
  Members(Job* job, const Hosts& hosts) {
    for (size_t h = 0; h < hosts.size(); ++h) {
      for (const int rank : hosts[h]) ranks_.push_back(std::make_unique<Rank>(job->socket(h), rank));
    }
  }
  ~Members() {
    for (auto& rank : ranks_) rank->leave();
  }

  template <class F>
  void each(F body, size_t count = SIZE_MAX) {
    test::Threads threads;
    for (size_t i = 0; i < std::min(count, ranks_.size()); ++i) {
      threads.start([body, rank = ranks_[i].get()] { body(*rank); });
    }
  }
  Rank& operator[](size_t i) { return *ranks_[i]; }

 private:
  std::vector<std::unique_ptr<Rank>> ranks_;
};

// As the daemons of all hosts do it: each by itself; the addresses come when all have.
void regroup(Job* job, uint64_t generation, const Hosts& hosts) {
  std::vector<std::string> addresses(hosts.size());
  {
    test::Threads threads;
    for (size_t h = 0; h < hosts.size(); ++h) {
      threads.start([=, &addresses] {
        CHECK_OK(job->engine(h).regroup({generation, static_cast<int>(h), hosts}));
        addresses[h] = job->engine(h).address();
      });
    }
  }
  for (size_t h = 0; h < hosts.size(); ++h) CHECK_OK(job->engine(h).set_peers(addresses));
}

int threads() {
  const std::filesystem::directory_iterator all("/proc/self/task");
  return static_cast<int>(std::distance(begin(all), end(all)));
}

// A thread that was joined is listed for a moment, and the handshakes of new connections come and go.
void await_threads(int most) {
  const int64_t deadline = now_ns() + 20 * kNsPerS;
  while (threads() > most) {
    CHECK(now_ns() < deadline);
    usleep(500);
  }
}

// Until the engine knows that a rank has left: the rank has its answer before.
void await_left(Engine* engine) {
  for (const int64_t deadline = now_ns() + 20 * kNsPerS;; usleep(500)) {
    CHECK(now_ns() < deadline);
    for (const Event& event : engine->events()) {
      if (std::string(event.kind) == "left") return;
    }
  }
}

void await_error(Job* job, size_t hosts, const std::string& error) {
  for (size_t h = 0; h < hosts; ++h) {
    const int64_t deadline = now_ns() + 20 * kNsPerS;
    while (job->engine(h).error().empty() && now_ns() < deadline) usleep(500);
    CHECK_EQ(job->engine(h).error(), error);
  }
}

// The sum over `n` ranks, in the world or in a communicator of all of them.
void all_reduce(Rank* rank, int n, uint32_t comm = 0) {
  const float all = static_cast<float>(n);
  fill(rank, kCount);
  CHECK_OK(rank->run(Kind::kAllReduce, kCount, -1, comm));
  expect(rank->dst(), kCount, all * (all - 1) / 2, all);
}

}  // namespace

TEST(an_error_ends_with_its_generation) {
  const Hosts hosts{{0, 1}, {2}};
  Job job(hosts);
  Members ranks(&job, hosts);
  const std::string addresses[2] = {job.engine(0).address(), job.engine(1).address()};
  float* const memory = ranks[0].src();
  ranks.each([](Rank& rank) { all_reduce(&rank, 3); });
  usleep(100'000);  // handshakes of the first connections are over; if not, the test sees less
  const int running = threads();
  for (uint64_t generation = 4; generation < 7; ++generation) {
    ranks.each([](Rank& rank) {
      all_reduce(&rank, 3);
      CHECK_OK(rank.client().create_comm(1, {0, 1, 2}, 10 * kNsPerS));
      all_reduce(&rank, 3, 1);
    });
    const std::string error = "enough of generation " + std::to_string(generation - 1);
    job.engine(generation % 2).abort(error);
    await_error(&job, 2, error);
    ranks.each([&](Rank& rank) { CHECK_EQ(rank.run(Kind::kAllReduce, kCount).message(), error); });

    regroup(&job, generation, hosts);
    await_threads(running);  // those of the old one, and of its communicators, have ended
    for (size_t h = 0; h < 2; ++h) {
      EXPECT_EQ(job.engine(h).error(), std::string());
      EXPECT_EQ(job.engine(h).address(), addresses[h]);
    }
  }
  ranks.each([](Rank& rank) { all_reduce(&rank, 3); });
  EXPECT_EQ(ranks[0].src(), memory);
  EXPECT_EQ(job.engine(0).counters().frames_refused.load(), uint64_t{0});
}

TEST(communicators_are_declared_anew) {
  const Hosts hosts{{0, 1}};
  Job job(hosts);
  Members ranks(&job, hosts);
  ranks.each([](Rank& rank) { CHECK_OK(rank.client().create_comm(7, {0, 1}, 10 * kNsPerS)); });
  regroup(&job, 4, hosts);
  // With other members, where the old one would be a clash.
  CHECK_OK(ranks[0].client().create_comm(7, {0}, 10 * kNsPerS));
  CHECK_OK(ranks[0].run(Kind::kAllReduce, kCount, -1, 7));
  EXPECT_EQ(job.engine(0).error(), std::string());
}

// The operation that waits for a rank fails with the reason; what that rank does later belongs to the next generation.
TEST(operations_do_not_outlive_their_generation) {
  const Hosts hosts{{0, 1}, {2}};
  Job job(hosts);
  Members ranks(&job, hosts);
  uint64_t ticket = 0;
  CHECK_OK(ranks[0].start(Kind::kBarrier, 0, -1, &ticket));
  while (job.engine(0).waiting(0).empty()) usleep(500);
  regroup(&job, 9, hosts);
  CHECK(!ranks[0].wait(ticket));
  ranks.each([](Rank& rank) { all_reduce(&rank, 3); });
  for (size_t h = 0; h < 2; ++h) EXPECT_EQ(job.engine(h).error(), std::string());
}

// A host is gone: the others go on without it, at last one alone.
TEST(hosts_go) {
  const Hosts hosts{{0, 1}, {2}, {3}};
  Job job(hosts);
  Members ranks(&job, hosts);
  ranks.each([](Rank& rank) { all_reduce(&rank, 4); });
  for (size_t left = 2; left > 0; --left) {
    job.engine(left).close();
    regroup(&job, 10 - left, Hosts(hosts.begin(), hosts.begin() + static_cast<std::ptrdiff_t>(left)));
    const size_t members = left + 1;
    ranks.each([=](Rank& rank) { all_reduce(&rank, static_cast<int>(members)); }, members);
  }
  EXPECT_EQ(job.engine(0).error(), std::string());
}

// The same bits, whether a new generation begins between two steps or not.
TEST(residuals_stay) {
  const Hosts hosts{{0, 1}, {2}};
  std::vector<float> results[2];
  for (const bool changes : {false, true}) {
    Job job(hosts);
    Members ranks(&job, hosts);
    for (uint64_t step = 0; step < 3; ++step) {
      ranks.each([](Rank& rank) {
        for (uint64_t i = 0; i < kCount; ++i) {
          rank.src()[i] = static_cast<float>((i * 7919 + static_cast<uint64_t>(rank.rank()) * 104729) % 1000) / 500 - 1;
        }
        uint64_t ticket = 0;
        CHECK_OK(rank.start_encoded(kCount, Codec::kSign1, 1, &ticket));
        CHECK_OK(rank.wait(ticket));
      });
      if (changes) regroup(&job, 4 + step, hosts);
    }
    EXPECT(job.engine(0).counters().residual_bytes.load() >= kCount * sizeof(float));
    results[changes].assign(ranks[2].dst(), ranks[2].dst() + kCount);
  }
  CHECK_EQ(memcmp(results[0].data(), results[1].data(), kCount * sizeof(float)), 0);
}

// Their memory waits for one generation, no longer.
TEST(residuals_of_a_communicator_that_does_not_come_back) {
  const Hosts hosts{{0}, {1}};
  Job job(hosts);
  Members ranks(&job, hosts);
  const std::atomic<uint64_t>& held = job.engine(0).counters().residual_bytes;
  ranks.each([](Rank& rank) {
    CHECK_OK(rank.client().create_comm(1, {0, 1}, 10 * kNsPerS));
    uint64_t ticket = 0;
    CHECK_OK(rank.start_encoded(kCount, Codec::kSign1, 1, &ticket, 1));
    CHECK_OK(rank.wait(ticket));
  });
  regroup(&job, 4, hosts);
  EXPECT(held.load() >= kCount * sizeof(float));
  regroup(&job, 5, hosts);
  EXPECT_EQ(held.load(), uint64_t{0});
}

TEST(generations_that_can_not_follow) {
  const Hosts hosts{{0, 1}, {2}};
  Job job(hosts);
  Members ranks(&job, hosts);
  Engine& engine = job.engine(0);
  for (const Membership& wrong : std::vector<Membership>{
           {3, 0, hosts}, {4, 2, hosts}, {4, 0, {}}, {4, 0, {{0}, {1}}}, {4, 0, {{0, 1}, {3}}}, {4, 1, hosts}}) {
    EXPECT(engine.regroup(wrong).code() == Code::kInvalid);
  }
  ranks.each([](Rank& rank) { all_reduce(&rank, 3); });
  ranks[1].leave();
  await_left(&engine);
  EXPECT_EQ(engine.regroup({4, 0, hosts}).message(), std::string("Engine: rank 1 has gone: no generation can have it"));
  EXPECT_EQ(engine.error(), std::string());
  job.close();
  EXPECT(engine.regroup({4, 0, hosts}).code() == Code::kInvalid);
}

// Other threads use the engine while its generations change.
TEST(questions_at_any_time) {
  const Hosts hosts{{0}, {1}};
  Job job(hosts);
  Members ranks(&job, hosts);
  std::atomic<bool> stop{false};
  test::Threads askers;
  askers.start([&] {
    while (!stop.load()) {
      job.engine(0).waiting(0);
      job.engine(0).error();
      job.engine(0).events();
    }
  });
  askers.start([&] {
    while (!stop.load()) {
      // Both may be refused between two generations.
      static_cast<void>(ranks[0].client().create_comm(3, {0}, 10 * kNsPerS));
      static_cast<void>(ranks[0].client().destroy_comm(3));
    }
  });
  for (uint64_t generation = 4; generation < 8; ++generation) regroup(&job, generation, hosts);
  stop.store(true);
  askers.join();
  ranks.each([](Rank& rank) { all_reduce(&rank, 2); });
  EXPECT_EQ(job.engine(0).error(), std::string());
}

}  // namespace bagua
