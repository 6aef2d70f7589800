// One stream or all of them: the trial, what follows from it, and when it is held again.
#include "transport/stream_count.h"

#include "harness.h"

namespace bagua {
namespace {

constexpr int64_t kMs = 1'000'000;

enum class Load { kIdle, kWaiting, kOnWay };

// A link seen every 5 ms: bytes arrive at `one` or `all` MB/s, by what the counter wants.
struct Link {
  StreamCount count;
  int64_t now = 1;
  uint64_t arrived = 0;

  void run(int64_t ms, double one, double all, Load load = Load::kWaiting) {
    const bool waiting = load == Load::kWaiting;
    for (int64_t t = 0; t < ms; t += 5) {
      now += 5 * kMs;
      arrived += static_cast<uint64_t>((count.all() ? all : one) * 1e6 * 0.005);
      if (count.due(now, waiting)) count.update(now, arrived, load == Load::kIdle ? 0 : 4u << 20, waiting);
    }
  }
};

TEST(all_streams_where_each_is_limited) {
  Link link;
  link.run(3000, 40, 150);
  EXPECT(link.count.all());
}

// The cost of a trial that changes nothing.
TEST(the_trial_of_all_is_short) {
  Link link;
  int64_t all_ms = 0;
  for (int i = 0; i < 10'000; ++i) {
    link.run(5, 110, 80);
    all_ms += link.count.all() ? 5 : 0;
  }
  EXPECT(all_ms > 0 && all_ms <= 260);
}

// The processor was busy while one stream was tried.
TEST(all_streams_must_win_twice) {
  Link link;
  link.run(550, 50, 90);
  EXPECT(link.count.all());
  link.run(3000, 110, 90);
  EXPECT(!link.count.all());
}

// A connection that still looks for its rate, or a processor that was busy for most of the trial.
TEST(the_best_of_one_stream_counts) {
  Link link;
  for (int i = 0; i < 2; ++i) {
    link.run(350, 40, 112);
    EXPECT(!link.count.all());
    link.run(200, 110, 112);
  }
  link.run(500, 40, 112);
  EXPECT(!link.count.all());
}

TEST(a_wrong_verdict_for_all_is_soon_corrected) {
  StreamVerdict verdict;
  Link link;
  link.count.share(&verdict);
  link.run(3000, 50, 100);
  EXPECT(link.count.all());
  EXPECT_EQ(verdict.get().hold_ns, StreamCount::kHoldAllNs);
  link.run(15'000, 110, 90);
  EXPECT(!link.count.all());
  EXPECT_EQ(verdict.get().hold_ns, StreamCount::kHoldNs);
}

TEST(another_mesh_goes_by_what_is_known) {
  StreamVerdict verdict;
  Link first, second;
  first.count.share(&verdict);
  second.count.share(&verdict);
  first.run(3000, 40, 150);
  EXPECT(first.count.all() && !second.count.all());
  second.run(10, 40, 150);
  EXPECT(second.count.all());
}

// Other traffic takes its share for a while.
TEST(a_short_slowness_is_no_reason_for_a_trial) {
  Link link;
  link.run(8000, 110, 112);
  for (int i = 0; i < 8; ++i) {
    link.run(1000, 30, 112);
    EXPECT(!link.count.all());
    link.run(500, 110, 112);
  }
}

TEST(time_without_work_says_nothing) {
  Link link;
  link.run(60'000, 110, 112, Load::kIdle);
  EXPECT(!link.count.all());
  link.run(300, 110, 112);
  EXPECT(!link.count.all());  // still its first trial
}

// All streams together take everything at once: nothing waits, and yet the trial ends.
TEST(what_sockets_hold_is_work_too) {
  Link shared, limited;
  shared.run(550, 110, 112);
  limited.run(550, 40, 150);
  EXPECT(shared.count.all() && limited.count.all());
  shared.run(300, 110, 112, Load::kOnWay);
  limited.run(3000, 40, 150, Load::kOnWay);
  EXPECT(!shared.count.all() && limited.count.all());
}

// An operation ends; the next one begins a second later. What was on its way arrived soon after the end.
TEST(a_pause_is_not_counted) {
  Link link;
  link.run(520, 110, 100);
  EXPECT(link.count.all());
  for (int i = 0; i < 3; ++i) {
    link.run(50, 0, 200, Load::kOnWay);
    link.now += 1000 * kMs;
    link.arrived += 4u << 20;
  }
  link.run(200, 110, 200, Load::kOnWay);
  link.run(1000, 110, 200);  // the second trial
  EXPECT(link.count.all());  // 200 against 110; with the pauses it would have been 15
}

TEST(a_stream_that_became_slow_is_tried_against_the_others) {
  Link link;
  link.run(3000, 110, 112);
  EXPECT(!link.count.all());
  link.run(20'000, 5, 112);
  EXPECT(link.count.all());
}

TEST(streams_that_vanish_do_not_count_backwards) {
  Link link;
  link.run(300, 110, 112);
  link.arrived = 0;  // of the streams that are left
  link.run(3000, 110, 112);
  EXPECT(!link.count.all());
}

}  // namespace
}  // namespace bagua
