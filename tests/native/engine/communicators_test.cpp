// Communicators that come and go while their hosts are out of step: nothing that was sent is lost, nothing is left
// behind, numbers may be used again, and a number that means two things at once is refused everywhere.
#include <sys/resource.h>

#include <filesystem>
#include <iterator>
#include <thread>

#include "engine_rig.h"

namespace bagua {
namespace {

using test::expect;
using test::fill;
using test::has;
using test::Job;
using test::Rank;

constexpr uint32_t kHigh = 0xfedcba98;  // a number as a hash makes them
constexpr uint64_t kCount = 250'000;

// Longer than a host that has gone is waited for (mesh_losses.cpp, kLossGraceNs).
void be_late() {
  std::this_thread::sleep_for(std::chrono::milliseconds(400));
}

void create(Rank* rank, uint32_t comm, const std::vector<int>& members) {
  CHECK_OK(rank->client().create_comm(comm, members, 10 * kNsPerS));
}

void destroy(Rank* rank, uint32_t comm) {
  CHECK_OK(rank->client().destroy_comm(comm));
}

void expect_no_error(Job* job, size_t hosts) {
  for (size_t h = 0; h < hosts; ++h) EXPECT_EQ(job->engine(h).error(), std::string());
}

size_t entries(const char* folder) {
  const std::filesystem::directory_iterator all(folder);
  return static_cast<size_t>(std::distance(begin(all), end(all)));
}

// One host has sent its part and destroyed the communicator long before the other asks for it.
TEST(what_was_sent_before_the_end_arrives) {
  Job job({{0, 1}, {2}}, 65536);
  job.each([](Rank& rank) {
    create(&rank, kHigh, {0, 1, 2});
    fill(&rank, kCount);
    CHECK_OK(rank.run(Kind::kBarrier, 0, -1, kHigh));
    if (rank.rank() == 2) be_late();
    for (int i = 0; i < 4; ++i) CHECK_OK(rank.run(Kind::kReduce, kCount, 2, kHigh));
    destroy(&rank, kHigh);
    if (rank.rank() == 2) expect(rank.dst(), kCount, 3, 3);
  });
  expect_no_error(&job, 2);
}

// A rank that is not the last to submit wakes nobody: what it submitted is taken before its communicator goes.
TEST(what_was_begun_before_a_destroy_is_finished) {
  Job job({{0, 1}}, 65536);
  job.each([](Rank& rank) {
    create(&rank, 5, {0, 1});
    fill(&rank, kCount);
    CHECK_OK(rank.run(Kind::kBarrier, 0, -1, 5));
    if (rank.rank() == 1) be_late();
    uint64_t ticket = 0;
    CHECK_OK(rank.start(Kind::kAllReduce, kCount, -1, &ticket, 5));
    destroy(&rank, 5);
    CHECK_OK(rank.wait(ticket));
    expect(rank.dst(), kCount, 1, 2);
  });
  expect_no_error(&job, 1);
}

// The same at the end of a job: the first host closes its engine.
TEST(what_was_sent_before_the_job_ends_arrives) {
  Job job({{0}, {1}}, 65536);
  test::Threads late;
  late.start([&job] {
    Rank rank(job.socket(1), 1);
    CHECK_OK(rank.run(Kind::kBarrier, 0));
    for (int i = 0; i < 5; ++i) be_late();  // longer than a closing engine waits
    for (int i = 0; i < 4; ++i) CHECK_OK(rank.run(Kind::kReduce, kCount, 1));
    rank.leave();
  });
  job.each(
      [](Rank& rank) {
        CHECK_OK(rank.run(Kind::kBarrier, 0));
        for (int i = 0; i < 4; ++i) CHECK_OK(rank.run(Kind::kReduce, kCount, 1));
      },
      1);
  job.engine(0).close();
  late.join();
  EXPECT_EQ(job.engine(1).error(), std::string());
}

// One host makes many communicators before the other makes its first. The other has room for some of the connections.
TEST(a_host_that_is_far_behind_is_waited_for) {
  constexpr rlim_t kDescriptors = 200;
  constexpr uint32_t kComms = 40;
  static_assert(kComms * 3 > kDescriptors / 4 + 32);  // network.cpp: most_parked(), and the handshakes at once
  rlimit before{};
  CHECK_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit few = before;
  few.rlim_cur = kDescriptors;
  CHECK_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  Job job({{0}, {1}}, 4096);
  CHECK_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  job.each([](Rank& rank) {
    fill(&rank, 100);
    CHECK_OK(rank.run(Kind::kBarrier, 0));
    for (int i = 0; i < 3 && rank.rank() == 1; ++i) be_late();
    for (uint32_t comm = 1; comm <= kComms; ++comm) create(&rank, comm, {0, 1});
    for (uint32_t comm = kComms; comm > 0; --comm) CHECK_OK(rank.run(Kind::kAllReduce, 100, -1, comm));
    expect(rank.dst(), 100, 1, 2);
  });
  expect_no_error(&job, 2);
  for (size_t host = 0; host < 2; ++host) EXPECT_EQ(job.engine(host).counters().bad_connections.load(), uint64_t{0});
}

TEST(two_hosts_go_on_talking_when_the_third_has_destroyed) {
  Job job({{0}, {1}, {2}}, 4096);
  job.each([](Rank& rank) {
    create(&rank, kHigh, {0, 1, 2});
    fill(&rank, kCount);
    CHECK_OK(rank.run(Kind::kBarrier, 0, -1, kHigh));
    if (rank.rank() > 0) be_late();
    for (int i = 0; i < 20 && rank.rank() > 0; ++i) {
      CHECK_OK(rank.run(rank.rank() == 1 ? Kind::kSend : Kind::kRecv, kCount, 3 - rank.rank(), kHigh));
    }
    destroy(&rank, kHigh);
    if (rank.rank() == 2) expect(rank.dst(), kCount, 1, 1);
  });
  expect_no_error(&job, 3);
}

TEST(an_operation_that_a_host_has_not_called_is_told) {
  Job job({{0}, {1}}, 4096);
  job.each([](Rank& rank) {
    create(&rank, 7, {0, 1});
    CHECK_OK(rank.run(Kind::kAllReduce, 10, -1, 7));
    if (rank.rank() == 1) return destroy(&rank, 7);
    has(rank.run(Kind::kAllReduce, 10, -1, 7),
        "host 1 (rank 1) has destroyed communicator 7, but all-reduce #1 of communicator 7 still needs it");
  });
}

TEST(a_send_that_nobody_will_receive_is_told) {
  Job job({{0}, {1}}, 4096);
  job.each([](Rank& rank) {
    create(&rank, 7, {0, 1});
    CHECK_OK(rank.run(Kind::kBarrier, 0, -1, 7));
    if (rank.rank() == 1) return destroy(&rank, 7);
    has(rank.run(Kind::kSend, 10, 1, 7), "rank 1 has destroyed communicator 7, but send #0");
  });
}

// Hundreds, some never used, the hosts far apart.
TEST(nothing_is_left_of_those_that_have_gone) {
  Job job({{0, 1}, {2, 3}}, 4096);
  constexpr size_t kLate = 20;
  std::atomic<size_t> descriptors{0}, threads{0};
  job.each([&](Rank& rank) {
    fill(&rank, 100);
    CHECK_OK(rank.run(Kind::kBarrier, 0));
    if (rank.rank() == 0) {
      // Some connections of the hosts may be accepted a moment later.
      descriptors = entries("/proc/self/fd") + kLate;
      threads = entries("/proc/self/task") + kLate;
    }
    CHECK_OK(rank.run(Kind::kBarrier, 0));
    for (uint32_t i = 0; i < 10 * kLate; ++i) {
      const int first = static_cast<int>(i % 2), second = 2 + static_cast<int>(i / 2 % 2);
      if (rank.rank() != first && rank.rank() != second) continue;
      create(&rank, kHigh + i, {first, second});
      if (i % 3 == 0) CHECK_OK(rank.run(Kind::kGather, 100, 1, kHigh + i));
      if (i % 3 == 1) CHECK_OK(rank.run(Kind::kAllReduce, 100, -1, kHigh + i));
      destroy(&rank, kHigh + i);
    }
    CHECK_OK(rank.run(Kind::kBarrier, 0));
    const int64_t deadline = now_ns() + 20 * kNsPerS;
    while (rank.rank() == 0 && now_ns() < deadline) {
      if (entries("/proc/self/fd") <= descriptors && entries("/proc/self/task") <= threads) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    if (rank.rank() == 0) {
      EXPECT(entries("/proc/self/fd") <= descriptors);
      EXPECT(entries("/proc/self/task") <= threads);
    }
    CHECK_OK(rank.run(Kind::kBarrier, 0));
  });
  expect_no_error(&job, 2);
}

// The second host still has the first one when the first host is many further.
TEST(a_number_is_used_again_before_all_have_let_it_go) {
  Job job({{0, 1}, {2}}, 4096);
  job.each([](Rank& rank) {
    for (int i = 0; i < 10; ++i) {
      create(&rank, kHigh, {0, 1, 2});
      if (i == 0 && rank.rank() == 2) be_late();
      if (i == 5 && rank.rank() == 1) be_late();  // and beside a rank of its own host
      fill(&rank, 1000);
      CHECK_OK(rank.run(Kind::kGather, 1000, 2, kHigh));
      if (rank.rank() == 2) expect(rank.dst() + 1000, 1000, 1, 1);
      destroy(&rank, kHigh);
    }
    create(&rank, kHigh, {0, 1, 2});
    fill(&rank, 160);
    CHECK_OK(rank.run(Kind::kAllReduce, 160, -1, kHigh));
    expect(rank.dst(), 160, 3, 3);
  });
  expect_no_error(&job, 2);
}

TEST(any_number_has_counters_and_residuals) {
  for (const uint32_t comm : {1u, 15u, 16u, 0x7fffffffu, 0x80000000u, 0xffffffffu}) {
    Job job({{0, 1}, {2}}, 4096);
    job.each([comm](Rank& rank) {
      create(&rank, comm, {0, 1, 2});
      fill(&rank, 4096);
      for (int i = 0; i < 3; ++i) {
        uint64_t ticket = 0;
        CHECK_OK(rank.start_encoded(4096, Codec::kF16, 3, &ticket, comm));
        CHECK_OK(rank.wait(ticket));
      }
      expect(rank.dst(), 4096, 3, 3);
      destroy(&rank, comm);
    });
    expect_no_error(&job, 2);
  }
}

TEST(a_clash_on_one_host_ends_the_job_with_words) {
  Job job({{0, 1}, {2, 3}}, 4096);
  const std::string text = "a number serves one communicator at a time";
  job.each([&](Rank& rank) {
    Status status = rank.run(Kind::kAllReduce, 8);  // all are there
    std::vector<int> members{rank.rank() % 2, 2 + rank.rank() % 2};
    if (status) status = rank.client().create_comm(kHigh, members, 10 * kNsPerS);
    while (status) status = rank.run(Kind::kAllReduce, 8, -1, kHigh);  // until the others have declared theirs
    has(status, text);
  });
  for (const size_t host : {0, 1}) EXPECT(job.engine(host).error().find(text) != std::string::npos);
}

}  // namespace
}  // namespace bagua
