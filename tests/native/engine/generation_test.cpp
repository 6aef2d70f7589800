// An elastic engine whose generation ends and is followed by another one: ranks keep their channels and memory, the
// port stays, and nothing of the old generation is in the new one.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "engine/local/generation_state.h"
#include "engine/local/job_state.h"
#include "engine_rig.h"

namespace bagua {
namespace {

using test::expect;
using test::fill;
using test::Job;
using test::Rank;

using Hosts = std::vector<std::vector<int>>;

constexpr uint64_t kCount = 30'000;

// Hosts of a generation, by the members there: ranks count through.
Membership membership(uint64_t generation, const Hosts& by_members, size_t host = 0) {
  Membership made{generation, static_cast<int>(host), {}, {}};
  for (const auto& there : by_members) {
    made.hosts.emplace_back();
    for (const int member : there) {
      made.hosts.back().push_back(static_cast<int>(made.members.size()));
      made.members.push_back(member);
    }
  }
  return made;
}

// All members of the world, or of a communicator of all of them, give their member number.
void all_reduce(Rank* rank, uint32_t comm = 0) {
  const GenerationView view = rank->client().view();
  float sum = 0;
  for (const int member : view.members) sum += static_cast<float>(member);
  fill(rank, kCount);
  CHECK_OK(rank->run(Kind::kAllReduce, kCount, -1, comm));
  expect(rank->dst(), kCount, sum, static_cast<float>(view.members.size()));
}

// An elastic job, and members that live as long as the test, each with a thread of its own for every body.
class World : public Job {
 public:
  explicit World(const Hosts& hosts, int64_t connect_timeout_ns = 30 * kNsPerS)
      : Job(hosts, 4096, true, Encryption::kBeyondLoopback, true, connect_timeout_ns) {
    for (size_t h = 0; h < hosts.size(); ++h) {
      for (const int member : hosts[h]) add(h, member);
    }
  }
  ~World() {
    for (auto& [member, rank] : ranks_) rank->leave();
  }

  void add(size_t host, int member) { ranks_[member] = std::make_unique<Rank>(socket(host), member); }
  // Without a goodbye.
  void kill(int member) { ranks_.erase(member); }
  template <class F>
  void each(F body) {
    test::Threads threads;
    for (auto& [member, rank] : ranks_) threads.start([body, rank = rank.get()] { body(*rank); });
  }
  void all_reduce() {
    each([](Rank& rank) { bagua::all_reduce(&rank); });
  }
  // All that there are enter the next generation.
  void enter() {
    each([](Rank& rank) { CHECK_OK(rank.client().enter(now_ns() + 20 * kNsPerS, nullptr)); });
  }
  // As the daemons of all hosts do it: each by itself; the addresses come when all have. `where`: which engines; `cut`:
  // who can't reach whom.
  void regroup(uint64_t generation, const Hosts& by_members, std::vector<size_t> where = {}, const Tokens& tokens = {},
               const std::set<std::pair<size_t, size_t>>& cut = {}) {
    for (size_t h = 0; where.size() < by_members.size(); ++h) where.push_back(h);
    std::vector<std::string> addresses(by_members.size());
    {
      test::Threads threads;
      for (size_t h = 0; h < by_members.size(); ++h) {
        threads.start([=, &addresses] {
          Engine& here = engine(where[h]);
          CHECK_OK(here.regroup(membership(generation, by_members, h), tokens));
          addresses[h] = here.address();
          if (addresses[h].empty()) addresses[h] = "127.0.0.1:1";  // of a single host
        });
      }
    }
    for (size_t h = 0; h < by_members.size(); ++h) {
      std::vector<std::string> seen = addresses;
      for (const auto& [from, to] : cut) {
        if (from == h) seen[to] = "127.0.0.1:1";
      }
      CHECK_OK(engine(where[h]).set_peers(seen));
    }
  }
  Rank& operator[](int member) { return *ranks_.at(member); }

 private:
  std::map<int, std::unique_ptr<Rank>> ranks_;
};

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

// Until the engine has told of the loss that suspended it.
Event await_suspended(Engine* engine) {
  for (const int64_t deadline = now_ns() + 20 * kNsPerS;; usleep(500)) {
    CHECK(now_ns() < deadline);
    for (const Event& event : engine->events()) {
      if (std::string(event.kind) == "suspended") return event;
    }
  }
}

std::vector<int> everybody(Rank* rank) {
  std::vector<int> ranks(rank->client().view().members.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace

TEST(a_loss_ends_with_its_generation) {
  const Hosts hosts{{0, 1}, {2}};
  World ranks(hosts);
  const std::string addresses[2] = {ranks.engine(0).address(), ranks.engine(1).address()};
  float* const memory = ranks[0].src();
  ranks.all_reduce();
  usleep(100'000);  // handshakes of the first connections are over; if not, the test sees less
  const int running = threads();
  for (uint64_t generation = 4; generation < 7; ++generation) {
    ranks.each([](Rank& rank) {
      all_reduce(&rank);
      CHECK_OK(rank.client().create_comm(1, everybody(&rank), 10 * kNsPerS));
      all_reduce(&rank, 1);
    });
    ranks.regroup(generation, hosts);
    ranks.each([&](Rank& rank) {
      const Status status = rank.run(Kind::kAllReduce, kCount);
      CHECK(status.code() == Code::kRegrouped);
      const std::string words = "generation " + std::to_string(generation) + " follows";
      CHECK(status.message().find(words) != std::string::npos);
    });
    ranks.enter();
    await_threads(running);  // those of the old one, and of its communicators, have ended
    for (size_t h = 0; h < 2; ++h) {
      EXPECT_EQ(ranks.engine(h).error(), std::string());
      EXPECT_EQ(ranks.engine(h).address(), addresses[h]);
    }
  }
  ranks.all_reduce();
  EXPECT_EQ(ranks[0].src(), memory);
  EXPECT_EQ(ranks.engine(0).counters().frames_refused.load(), uint64_t{0});
}

// The operation that waits for a rank ends as regrouped, and so does what ranks submit that have not entered.
TEST(operations_do_not_outlive_their_generation) {
  const Hosts hosts{{0, 1}, {2}};
  World ranks(hosts);
  uint64_t ticket = 0;
  CHECK_OK(ranks[0].start(Kind::kBarrier, 0, -1, &ticket));
  while (ranks.engine(0).waiting(0).empty()) usleep(500);
  ranks.regroup(9, hosts);
  CHECK(ranks[0].wait(ticket).code() == Code::kRegrouped);
  CHECK(ranks[1].run(Kind::kBarrier, 0).code() == Code::kRegrouped);
  // As one that submits in the moment of the change.
  ranks[1].client().sheet()->status.store(kRunning);
  CHECK(ranks[1].run(Kind::kBarrier, 0).code() == Code::kRegrouped);
  CHECK(ranks[1].client().create_comm(7, {0, 1}, 10 * kNsPerS).code() == Code::kRegrouped);
  ranks.enter();
  ranks.all_reduce();
  for (size_t h = 0; h < 2; ++h) EXPECT_EQ(ranks.engine(h).error(), std::string());
}

TEST(ranks_go) {
  World ranks(Hosts{{0, 1, 2, 3}});
  ranks.all_reduce();
  std::vector<int> left{0, 1, 2, 3};
  const std::atomic<uint64_t>& held = ranks.engine(0).counters().segment_bytes;
  const uint64_t each = held.load() / 4;
  for (const int gone : {2, 0, 3}) {
    uint64_t ticket = 0;
    left.erase(std::find(left.begin(), left.end(), gone));
    CHECK_OK(ranks[left.front()].start(Kind::kBarrier, 0, -1, &ticket));
    ranks.kill(gone);
    CHECK(ranks[left.front()].wait(ticket).code() == Code::kRegrouped);
    const Event event = await_suspended(&ranks.engine(0));
    EXPECT(event.rank == gone && event.host == -1);
    ranks.regroup(10 - left.size(), {left});
    ranks.enter();
    ranks.all_reduce();
    EXPECT_EQ(held.load(), each * left.size());
  }
  EXPECT_EQ(ranks.engine(0).error(), std::string());
}

// A host ends its part, and says so: the others need not wait until its ranks have ended.
TEST(a_host_withdraws) {
  World ranks(Hosts{{0}, {1}, {2}});
  ranks.all_reduce();
  ranks.engine(1).withdraw("its daemon was stopped");
  EXPECT_EQ(await_suspended(&ranks.engine(0)).host, 1);
  EXPECT_EQ(await_suspended(&ranks.engine(2)).host, 1);
  EXPECT_EQ(await_suspended(&ranks.engine(1)).host, -1);
  ranks.kill(1);
  ranks.engine(1).close();
  ranks.regroup(4, {{0}, {2}}, {0, 2});
  ranks.enter();
  ranks.all_reduce();
  EXPECT_EQ(ranks.engine(0).error(), std::string());
}

// Who dials a host in vain answers others meanwhile, so nobody accuses it. All tell what they have seen themselves,
// whoever speaks first.
TEST(a_host_that_reaches_nobody) {
  const Hosts hosts{{0}, {1}, {2}, {3}};
  World ranks(hosts, 7 * kNsPerS);
  ranks.each([](Rank& rank) {
    for (int step = 0; step < 20; ++step) all_reduce(&rank);  // so that it is known how long one takes
  });
  ranks.regroup(4, hosts, {}, {}, {{0, 1}, {1, 2}, {1, 3}});
  ranks.enter();
  ranks[1].client().note_passes(17);
  ranks.each([](Rank& rank) { CHECK(rank.run(Kind::kAllReduce, kCount).code() == Code::kRegrouped); });
  std::set<std::pair<int, int>> accused;
  for (int host = 0; host < 4; ++host) {
    const Event event = await_suspended(&ranks.engine(static_cast<size_t>(host)));
    EXPECT_EQ(event.passes, host == 1 ? uint64_t{17} : uint64_t{0});
    for (const int other : event.accused) accused.insert({host, other});
  }
  for (const auto& [one, other] : accused) EXPECT(one == 1 || other == 1);
  EXPECT(accused.count({0, 1}) + accused.count({1, 0}) > 0);
  EXPECT(accused.count({1, 2}) == 1 && accused.count({1, 3}) == 1);
  ranks.regroup(5, {{0}, {2}, {3}}, {0, 2, 3});
  ranks.kill(1);
  ranks.enter();
  ranks.all_reduce();
}

// A host is gone: the others suspend by themselves, and go on without it, at last one alone.
TEST(hosts_go) {
  const Hosts hosts{{0, 1}, {2}, {3}};
  World ranks(hosts);
  ranks.all_reduce();
  Hosts there = hosts;
  std::vector<size_t> engines{0, 1, 2};
  for (const size_t gone : {size_t{1}, size_t{1}}) {  // by place in `there`
    for (const int member : there[gone]) ranks.kill(member);
    for (const size_t engine : engines) {  // the others say it, too: the daemon there may not live so long
      EXPECT_EQ(await_suspended(&ranks.engine(engine)).host, engine == engines[gone] ? -1 : static_cast<int>(gone));
    }
    ranks.engine(engines[gone]).close();
    there.erase(there.begin() + static_cast<std::ptrdiff_t>(gone));
    engines.erase(engines.begin() + static_cast<std::ptrdiff_t>(gone));
    ranks.each([](Rank& rank) { CHECK(rank.run(Kind::kAllReduce, kCount).code() == Code::kRegrouped); });
    ranks.regroup(10 - there.size(), there, engines);
    ranks.enter();
    ranks.all_reduce();
  }
  EXPECT_EQ(ranks.engine(0).error(), std::string());
}

// Members join with a token, on a host that is there and on one that becomes empty.
TEST(members_come) {
  World ranks(Hosts{{0, 1}, {2}});
  ranks.all_reduce();
  ranks.kill(2);
  ranks.kill(0);
  const auto token = [](int member) { return std::vector<uint8_t>(kTokenBytes, static_cast<uint8_t>(member + 1)); };
  const Hosts next{{1, 4}, {5}};
  const Membership missing = membership(4, next);
  EXPECT(ranks.engine(0).regroup(missing, {{5, token(5)}}).code() == Code::kInvalid);
  ranks.regroup(4, next, {}, {{4, token(4)}, {5, token(5)}});
  std::unique_ptr<ChannelClient> old;
  EXPECT(!ChannelClient::connect(ranks.socket(0), token(0).data(), 0, 10 * kNsPerS, &old));
  ranks.enter();
  ranks.add(0, 4);
  ranks.add(1, 5);
  ranks.all_reduce();
  EXPECT_EQ(ranks[5].client().view().rank, 2);
  for (size_t h = 0; h < 2; ++h) EXPECT_EQ(ranks.engine(h).error(), std::string());
}

// Two are lost one after the other, the second while the daemons regroup.
TEST(a_loss_while_regrouping) {
  World ranks(Hosts{{0, 1, 2}});
  ranks.kill(2);
  await_suspended(&ranks.engine(0));
  ranks.kill(1);
  ranks.regroup(4, {{0, 1}});  // the coordinator did not know yet
  EXPECT_EQ(await_suspended(&ranks.engine(0)).rank, 1);
  ranks.enter();
  CHECK(ranks[0].run(Kind::kAllReduce, kCount).code() == Code::kRegrouped);
  ranks.regroup(5, {{0}});
  ranks.enter();
  ranks.all_reduce();
}

// Nobody answers at the address of a host that the coordinator believed to be alive.
TEST(a_host_that_dies_while_others_regroup) {
  const Hosts hosts{{0}, {1}, {2}};
  World ranks(hosts);
  ranks.all_reduce();
  std::vector<std::string> addresses;
  for (size_t h = 0; h < 3; ++h) addresses.push_back(ranks.engine(h).address());
  ranks.kill(2);
  ranks.engine(2).close();
  for (size_t h = 0; h < 2; ++h) {
    CHECK_OK(ranks.engine(h).regroup(membership(4, hosts, h), {}));
    CHECK_OK(ranks.engine(h).set_peers(addresses));
  }
  ranks.enter();
  uint64_t tickets[2] = {0, 0};
  ranks.each([&tickets](Rank& rank) { CHECK_OK(rank.start(Kind::kBarrier, 0, -1, &tickets[rank.rank()])); });
  ranks.regroup(5, {{0}, {1}});
  ranks.each([&tickets](Rank& rank) { CHECK(rank.wait(tickets[rank.rank()]).code() == Code::kRegrouped); });
  ranks.enter();
  ranks.all_reduce();
}

// Host 0 calls host 1, which is still in the last generation, until it follows.
TEST(a_host_that_follows_late) {
  const Hosts hosts{{0}, {1}};
  World ranks(hosts);
  ranks.all_reduce();
  const std::vector<std::string> addresses{ranks.engine(0).address(), ranks.engine(1).address()};
  const std::atomic<uint64_t>& refused = ranks.engine(1).counters().frames_dropped;
  const uint64_t before = refused.load();
  CHECK_OK(ranks.engine(0).regroup(membership(4, hosts, 0), {}));
  CHECK_OK(ranks.engine(0).set_peers(addresses));
  for (const int64_t deadline = now_ns() + 20 * kNsPerS; refused.load() == before; usleep(500))
    CHECK(now_ns() < deadline);
  CHECK_OK(ranks.engine(1).regroup(membership(4, hosts, 1), {}));
  CHECK_OK(ranks.engine(1).set_peers(addresses));
  ranks.enter();
  ranks.all_reduce();
  for (size_t h = 0; h < 2; ++h) EXPECT_EQ(ranks.engine(h).error(), std::string());
}

TEST(a_suspended_job_that_is_aborted) {
  const Hosts hosts{{0, 1}};
  World ranks(hosts);
  test::Threads threads;
  threads.start(
      [&] { CHECK_EQ(ranks[0].client().enter(-1, nullptr).message(), std::string("nobody is left on other hosts")); });
  ranks.kill(1);
  await_suspended(&ranks.engine(0));
  CHECK(ranks[0].client().enter(now_ns() + kNsPerMs, nullptr).code() == Code::kTimeout);
  CHECK(ranks[0].client().enter(-1, [] { return true; }).code() == Code::kAborted);
  EXPECT_EQ(ranks.engine(0).error(), std::string());
  ranks.engine(0).abort("nobody is left on other hosts");
  threads.join();
  EXPECT_EQ(ranks.engine(0).error(), std::string("nobody is left on other hosts"));
  CHECK_EQ(ranks[0].run(Kind::kBarrier, 0).message(), std::string("nobody is left on other hosts"));
  EXPECT(ranks.engine(0).regroup(membership(4, {{0}}), {}).code() == Code::kInvalid);
}

TEST(one_that_is_left_out) {
  World ranks(Hosts{{0, 1}});
  ranks.regroup(4, {{1}});
  const Status status = ranks[0].client().enter(-1, nullptr);
  CHECK(status.code() == Code::kUnavailable && status.message().find("without this process") != std::string::npos);
  ChannelClient::Allocation memory;
  CHECK(!ranks[0].client().alloc(4096, &memory));
  CHECK_OK(ranks[1].client().enter(-1, nullptr));
  ranks.kill(0);  // nobody's loss
  all_reduce(&ranks[1]);
  EXPECT_EQ(ranks.engine(0).error(), std::string());
}

// A step that was not committed is repeated in the next generation, with the same bits, as if it had run once.
TEST(a_repeated_step_reads_the_same_residual) {
  const Hosts hosts{{0, 1}, {2}};
  std::vector<float> results[2];
  for (const bool repeats : {false, true}) {
    World ranks(hosts);
    for (uint64_t step = 0; step < 4; ++step) {
      for (uint64_t attempt = 0; attempt < (repeats ? 2 : 1); ++attempt) {
        ranks.each([step](Rank& rank) {
          for (uint64_t i = 0; i < kCount; ++i) {
            rank.src()[i] =
                static_cast<float>((i * 7919 + static_cast<uint64_t>(rank.rank()) * 104729) % 1000) / 500 - 1;
          }
          uint64_t ticket = 0;
          const ResidualSides sides = step % 2 == 0 ? kRead0Write1 : kRead1Write0;
          CHECK_OK(rank.start_encoded(kCount, Codec::kSign1, 1, &ticket, 0, ReduceOp::kSum, sides));
          CHECK_OK(rank.wait(ticket));
        });
        if (!repeats) continue;
        ranks.regroup(4 + 2 * step + attempt, hosts);
        ranks.enter();
      }
    }
    results[repeats].assign(ranks[2].dst(), ranks[2].dst() + kCount);
  }
  CHECK_EQ(memcmp(results[0].data(), results[1].data(), kCount * sizeof(float)), 0);
}

// Two steps send next to nothing; a third one, without a host, sends all that the other two have kept.
TEST(what_was_lost_comes_back_when_blocks_change_their_owner) {
  constexpr uint64_t kBlocks = 6, kLong = kBlocks * 16384;
  const Hosts hosts{{0}, {1}, {2}};
  World ranks(hosts);
  const auto step = [&ranks](Codec codec) {
    ranks.each([codec](Rank& rank) {
      std::fill_n(rank.src(), kLong, static_cast<float>(1 << rank.rank()));
      uint64_t ticket = 0;
      CHECK_OK(rank.start_encoded(kLong, codec, 1, &ticket, 0, ReduceOp::kAvg));
      CHECK_OK(rank.wait(ticket));
    });
  };
  step(Codec::kTopK);
  step(Codec::kTopK);
  ranks.kill(2);
  await_suspended(&ranks.engine(2));
  ranks.engine(2).close();
  ranks.regroup(4, {{0}, {1}});
  ranks.enter();
  step(Codec::kF16);
  const float lost = 2 * (1.0f + 2.0f) / 3, mean = (1.0f + 2.0f) / 2;
  for (uint64_t block = 0; block < kBlocks; ++block) {
    for (const uint64_t at : {uint64_t{8000}, uint64_t{16000}}) {
      const float value = ranks[0].dst()[block * 16384 + at];
      CHECK(std::abs(value - (mean + lost)) < 0.01f);
      CHECK_EQ(value, ranks[1].dst()[block * 16384 + at]);
    }
  }
}

// Their memory waits until a generation has made steps without them.
TEST(residuals_of_a_communicator_that_does_not_come_back) {
  const Hosts hosts{{0}, {1}};
  World ranks(hosts);
  const std::atomic<uint64_t>& held = ranks.engine(0).counters().residual_bytes;
  ranks.each([](Rank& rank) {
    CHECK_OK(rank.client().create_comm(1, {0, 1}, 10 * kNsPerS));
    uint64_t ticket = 0;
    CHECK_OK(rank.start_encoded(kCount, Codec::kSign1, 1, &ticket, 1));
    CHECK_OK(rank.wait(ticket));
  });
  const uint64_t one = held.load();
  EXPECT(one >= kCount * sizeof(float));
  ranks.regroup(4, hosts);
  ranks.regroup(5, hosts);  // nobody has made a step in between, so all may come back
  EXPECT_EQ(held.load(), one);
  ranks.enter();
  ranks.each([](Rank& rank) {
    uint64_t ticket = 0;
    CHECK_OK(rank.start_encoded(kCount, Codec::kSign1, 1, &ticket, 0));
    CHECK_OK(rank.wait(ticket));
  });
  EXPECT_EQ(held.load(), 2 * one);
  ranks.regroup(6, hosts);
  EXPECT_EQ(held.load(), one);
}

// A newcomer joins two hosts, then the first host leaves; each time all wait at the boundary before or after the plan
// comes, and nobody hears of a loss.
TEST(members_come_and_go_as_planned) {
  World ranks(Hosts{{0}, {1}});
  ranks.all_reduce();
  std::vector<std::string> addresses{ranks.engine(0).address(), ranks.engine(1).address()};
  CHECK_OK(ranks.engine(1).open_lobby({2}, {{2, std::vector<uint8_t>(kTokenBytes, 3)}}));
  ranks.add(1, 2);
  CHECK(ranks[2].client().view().newcomer && ranks[2].client().view().members == std::vector<int>{2});
  all_reduce(&ranks[2]);
  {
    test::Threads threads;
    threads.start([&] { ranks.enter(); });
    const Hosts next{{0}, {1, 2}};
    for (size_t h = 0; h < 2; ++h) CHECK_OK(ranks.engine(h).plan({membership(4, next, h), addresses}));
  }
  CHECK(!ranks[2].client().view().newcomer && ranks[0].client().planned() == 4);
  ranks.all_reduce();

  Plan without;
  without.here = false;
  without.next.generation = 5;
  CHECK_OK(ranks.engine(0).plan(without));
  CHECK_OK(ranks.engine(1).plan({membership(5, {{1, 2}}), {addresses[1]}}));
  ranks.each([](Rank& rank) {
    const Code code = rank.client().enter(now_ns() + 20 * kNsPerS, nullptr).code();
    CHECK(code == (rank.rank() == 0 ? Code::kDismissed : Code::kOk));
  });
  ranks.kill(0);
  ranks.all_reduce();
  for (size_t h = 0; h < 2; ++h) {
    for (const Event& event : ranks.engine(h).events()) CHECK(std::string(event.kind) != "suspended");
    EXPECT_EQ(ranks.engine(h).error(), std::string());
  }
}

// They enter a planned generation first: members come after a step that takes longer than a connection may.
TEST(newcomers_alone_on_their_host_wait_for_a_step_of_the_members) {
  World ranks(Hosts{{0}, {1}}, kNsPerS / 2);
  ranks.all_reduce();
  EngineOptions options;
  options.credentials.job_id = "job";
  options.data_socket = ranks.socket(0) + "-third";
  options.tokens.emplace_back(2, std::vector<uint8_t>(kTokenBytes, 3));
  options.listen = "127.0.0.1:0";
  options.streams = 2;
  options.connect_timeout_ns = kNsPerS / 2;
  options.chunk_bytes = 4096;
  options.threads = 2;
  options.elastic = true;
  const std::string socket = options.data_socket;
  std::unique_ptr<Engine> third;
  CHECK_OK(Engine::create(std::move(options), {3, 0, {{0}}, {2}, true}, &third));
  {
    Rank newcomer(socket, 2);
    const std::vector<std::string> addresses{ranks.engine(0).address(), ranks.engine(1).address(), third->address()};
    const Hosts next{{0}, {1}, {2}};
    test::Threads threads;
    threads.start([&] {
      CHECK_OK(newcomer.client().enter(now_ns() + 20 * kNsPerS, nullptr));
      all_reduce(&newcomer);
    });
    CHECK_OK(third->plan({membership(4, next, 2), addresses}));
    usleep(2'000'000);
    for (const Event& event : third->events()) CHECK(std::string(event.kind) != "suspended");
    for (size_t h = 0; h < 2; ++h) CHECK_OK(ranks.engine(h).plan({membership(4, next, h), addresses}));
    ranks.enter();
    ranks.all_reduce();
  }
  ranks.close();
  third->close();
}

// A step may have to be repeated: newcomers wait for a generation that is planned later.
TEST(a_loss_before_the_boundary) {
  World ranks(Hosts{{0, 1}});
  CHECK_OK(ranks.engine(0).open_lobby({2}, {{2, std::vector<uint8_t>(kTokenBytes, 3)}}));
  ranks.add(0, 2);
  CHECK(ranks[2].client().enter(now_ns(), nullptr).code() == Code::kTimeout);
  const std::string address = ranks.engine(0).address();
  CHECK_OK(ranks.engine(0).plan({membership(4, {{0, 1, 2}}), {address}}));
  ranks.kill(1);
  await_suspended(&ranks.engine(0));
  CHECK(ranks[0].client().enter(now_ns() + 50 * kNsPerMs, nullptr).code() == Code::kTimeout);
  ranks.regroup(5, {{0}});
  CHECK_OK(ranks[0].client().enter(now_ns() + 20 * kNsPerS, nullptr));
  all_reduce(&ranks[0]);
  CHECK_OK(ranks.engine(0).plan({membership(6, {{0, 2}}), {address}}));
  ranks.enter();
  ranks.all_reduce();
}

TEST(newcomers_that_fail) {
  World ranks(Hosts{{0}});
  const Tokens tokens{{1, std::vector<uint8_t>(kTokenBytes, 2)}, {2, std::vector<uint8_t>(kTokenBytes, 3)}};
  CHECK_OK(ranks.engine(0).open_lobby({1, 2}, tokens));
  ranks.add(0, 1);
  ranks.add(0, 2);
  CHECK_OK(ranks.engine(0).plan({membership(4, {{0, 1}}), {ranks.engine(0).address()}}));
  ranks.kill(2);
  CHECK(ranks[1].run(Kind::kBarrier, 0).code() == Code::kRegrouped);  // its lobby is lost
  const Status status = ranks[1].client().enter(now_ns() + 20 * kNsPerS, nullptr);
  CHECK(status.code() == Code::kUnavailable && status.message().find("not ready to join") != std::string::npos);
  all_reduce(&ranks[0]);
  EXPECT_EQ(ranks.engine(0).error(), std::string());
}

TEST(generations_that_can_not_follow) {
  const Hosts hosts{{0, 1}, {2}};
  World ranks(hosts);
  Engine& engine = ranks.engine(0);
  for (const Membership& wrong : std::vector<Membership>{{3, 0, hosts, {}},
                                                         {4, 2, hosts, {}},
                                                         {4, 0, {}, {}},
                                                         {4, 0, {{0, 1}, {3}}, {}},
                                                         {4, 1, hosts, {}},
                                                         {4, 0, hosts, {0, 1}},
                                                         {4, 0, hosts, {0, 1, 1}},
                                                         {4, 0, hosts, {0, 5, 2}}}) {
    EXPECT(engine.regroup(wrong, {}).code() == Code::kInvalid);
  }
  ranks.all_reduce();
  EXPECT_EQ(engine.error(), std::string());
  ranks.close();
  EXPECT(engine.regroup({4, 0, hosts, {}}, {}).code() == Code::kInvalid);
  Job fixed(Hosts{{0}});
  EXPECT(fixed.engine(0).regroup({4, 0, {{0}}, {}}, {}).message().find("not elastic") != std::string::npos);
}

// A member asks the generation that ends while the channels of others go with it.
TEST(memory_is_freed_while_members_go) {
  Hosts hosts{{0, 1, 2, 3, 4, 5}};
  World ranks(hosts);
  std::atomic<bool> stop{false};
  test::Threads askers;
  askers.start([&stop, &client = ranks[0].client()] {
    while (!stop.load()) {
      ChannelClient::Allocation memory;
      if (client.alloc(4096, &memory)) static_cast<void>(client.free_segment(memory.id));
    }
  });
  for (uint64_t generation = 4; generation < 9; ++generation) {
    ranks.kill(hosts[0].back());
    hosts[0].pop_back();
    await_suspended(&ranks.engine(0));
    ranks.regroup(generation, hosts);
    ranks.enter();
  }
  stop.store(true);
  askers.join();
  ranks.all_reduce();
}

// Other threads use the engine while its generations change.
TEST(questions_at_any_time) {
  const Hosts hosts{{0}, {1}};
  World ranks(hosts);
  std::atomic<bool> stop{false};
  test::Threads askers;
  askers.start([&] {
    while (!stop.load()) {
      ranks.engine(0).waiting(0);
      ranks.engine(0).error();
      ranks.engine(0).events();
    }
  });
  askers.start([&] {
    while (!stop.load()) {
      // Both may be refused between two generations.
      static_cast<void>(ranks[0].client().create_comm(3, {0}, 10 * kNsPerS));
      static_cast<void>(ranks[0].client().destroy_comm(3));
    }
  });
  for (uint64_t generation = 4; generation < 8; ++generation) {
    ranks.regroup(generation, hosts);
    ranks.enter();
  }
  stop.store(true);
  askers.join();
  ranks.all_reduce();
  EXPECT_EQ(ranks.engine(0).error(), std::string());
}

}  // namespace bagua
