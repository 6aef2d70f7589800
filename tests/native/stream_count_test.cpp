// One stream or all of them: the trial, what follows from it, and when it is held again.
#include "transport/stream_count.h"

#include "harness.h"

namespace bagua {
namespace {

constexpr int64_t kMs = 1'000'000;

// A link seen every 5 ms: bytes arrive at `one` or `all` MB/s, by what the counter wants.
struct Link {
  StreamCount count;
  int64_t now = 1;
  uint64_t arrived = 0;

  void run(int64_t ms, double one, double all, bool saturated = true) {
    for (int64_t t = 0; t < ms; t += 5) {
      now += 5 * kMs;
      arrived += static_cast<uint64_t>((count.all() ? all : one) * 1e6 * 0.005);
      if (count.due(now, saturated)) count.update(now, arrived, saturated);
    }
  }
};

TEST(one_stream_where_more_bring_nothing) {
  Link link;
  EXPECT(!link.count.all());
  link.run(3000, 110, 112);
  EXPECT(!link.count.all());
}

TEST(all_streams_where_each_is_limited) {
  Link link;
  link.run(3000, 40, 150);
  EXPECT(link.count.all());
}

TEST(both_are_tried_before_it_is_decided) {
  Link link;
  link.run(550, 110, 112);
  EXPECT(link.count.all());  // the second half of the trial
}

// What a trial costs where it changes nothing.
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

TEST(a_verdict_that_is_confirmed_lasts_longer) {
  StreamVerdict verdict;
  Link link;
  link.count.share(&verdict);
  link.run(1000, 110, 80);
  EXPECT_EQ(verdict.get().hold_ns, StreamCount::kHoldNs);
  link.run(62'000, 110, 80);
  EXPECT_EQ(verdict.get().hold_ns, 2 * StreamCount::kHoldNs);
  EXPECT(!link.count.all());
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
  link.run(60'000, 110, 112, false);
  EXPECT(!link.count.all());
  link.run(300, 110, 112);
  EXPECT(!link.count.all());  // still its first trial
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
