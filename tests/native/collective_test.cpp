// Every kind of operation, run as in collective_rig.h.
#include <algorithm>
#include <random>
#include <vector>

#include "collective/builder.h"
#include "collective_rig.h"

namespace bagua::collective {
namespace {

const std::vector<Members> kTopologies = {
    {{0}},
    {{0, 1, 2, 3}},
    {{0}, {1}},
    {{0, 1}, {2, 3}},
    {{0, 1, 2}, {3}},
    {{0, 3}, {1}, {2, 4}},
    {{0}, {1}, {2}, {3}, {4}},
    {{5}, {0, 1}, {4}, {2, 3}},
};

// A permutation of the hosts; 0: none.
std::vector<int> ring_number(unsigned seed, size_t hosts) {
  std::vector<int> ring;
  for (size_t h = 0; seed > 0 && h < hosts; ++h) ring.push_back(static_cast<int>(h));
  std::mt19937 random(seed);
  std::shuffle(ring.begin(), ring.end(), random);
  return ring;
}

void run_cases(Kind kind, ReduceOp op, bool may_be_in_place) {
  for (const Members& members : kTopologies) {
    Topology topology{members, 0};
    for (const uint64_t count : {uint64_t{0}, uint64_t{1}, uint64_t{5}, uint64_t{16}, uint64_t{333}, uint64_t{9000}}) {
      for (const int in_place : {0, 1}) {
        if (in_place && !may_be_in_place) continue;
        Case c;
        c.request = {kind, DType::kF32, op, count, kind_rooted(kind) ? topology.size() - 1 : -1};
        c.members = members;
        c.chunk_bytes = count > 1000 ? 4096 : 64;
        c.in_place = in_place != 0;
        for (unsigned seed = 0; seed < 3; ++seed) {
          c.ring = ring_number(seed, members.size());
          Simulation simulation(c, seed);
          CHECK(simulation.run());
          simulation.check();
        }
      }
    }
  }
}

}  // namespace

TEST(every_kind) {
  run_cases(Kind::kBarrier, ReduceOp::kSum, false);
  run_cases(Kind::kAllToAll, ReduceOp::kSum, false);
  for (const Kind kind :
       {Kind::kAllReduce, Kind::kReduce, Kind::kBroadcast, Kind::kAllGather, Kind::kGather, Kind::kScatter})
    run_cases(kind, ReduceOp::kSum, true);
  for (const Kind kind : {Kind::kAllReduce, Kind::kReduceScatter}) run_cases(kind, ReduceOp::kAvg, true);
}

// Vectors that go whole, up to where the ring takes over; and both patterns of few trips by themselves, also with more
// hosts than elements.
TEST(all_reduce_in_few_trips) {
  const auto of = [](auto build) {
    return [build](const Topology& topology, const Request& request, size_t chunk) {
      Builder builder(topology, request, chunk);
      build(&builder, Range{0, request.count});
      return builder.finish();
    };
  };
  for (int hosts = 2; hosts <= 9; ++hosts) {
    Case c;
    int rank = 0;
    for (int h = 0; h < hosts; ++h) {
      c.members.emplace_back();
      for (int m = 0; m <= h % 3; ++m) c.members.back().push_back(rank++);
    }
    c.chunk_bytes = 1 << 20;
    for (const uint64_t count : {1, 3, 100, 1001}) {
      for (unsigned seed = 0; seed < 4; ++seed) {
        c.request = {Kind::kAllReduce, DType::kF32, seed % 2 ? ReduceOp::kAvg : ReduceOp::kSum, count, -1};
        c.in_place = seed >= 2;
        c.make_program = of(build_direct);
        Simulation one(c, seed);
        CHECK(one.run());
        one.check();
        CHECK_EQ(one.messages(), static_cast<size_t>(hosts * (hosts - 1)));
        c.make_program = of(build_halving_doubling);
        Simulation two(c, seed);
        CHECK(two.run());
        two.check();
      }
    }
  }
}

TEST(patterns_by_cost) {
  CHECK(cheapest_pattern(2, 4) == Pattern::kDirect);
  CHECK(cheapest_pattern(8, 32 << 10) == Pattern::kDirect);
  CHECK(cheapest_pattern(2, 512 << 10) == Pattern::kDirect);  // as many bytes as the ring, half the trips
  CHECK(cheapest_pattern(2, 600 << 10) == Pattern::kRing);
  CHECK(cheapest_pattern(4, 100 << 10) == Pattern::kDirect);
  CHECK(cheapest_pattern(4, 300 << 10) == Pattern::kHalvingDoubling);
  CHECK(cheapest_pattern(8, 200 << 10) == Pattern::kHalvingDoubling);
  CHECK(cheapest_pattern(3, 500 << 10) == Pattern::kRing);
  CHECK(cheapest_pattern(16, 4) == Pattern::kHalvingDoubling);
  CHECK(cheapest_pattern(100, 100 << 10) == Pattern::kHalvingDoubling);
}

// A barrier is one message each way between all hosts, so nobody passes before everybody came.
TEST(barrier_hears_from_everybody) {
  const Topology topology{{{0}, {1, 2}, {3}}, 1};
  const Program program = compile(topology, Request{}, 64);
  CHECK_EQ(program.peers.size(), size_t{2});
  CHECK_EQ(program.steps.size(), size_t{4});
}

// 2 (hosts - 1) / hosts of the vector leave each host, whatever the number of its ranks.
TEST(ring_sends_the_least) {
  const Topology topology{{{0, 1, 2}, {3}, {4, 5}, {6}}, 2};
  Request request;
  request.kind = Kind::kAllReduce;
  request.count = 1 << 20;
  const Program program = compile(topology, request, 1 << 16);
  uint64_t sent = 0;
  for (const Step& step : program.steps) sent += step.type == Step::Type::kSend ? step.bytes : 0;
  CHECK_EQ(sent, uint64_t{4} * request.count * 2 * 3 / 4);
  CHECK(program.scratch_bytes <= (size_t{8} << 16));  // bounded, however long the vector
}

}  // namespace bagua::collective
