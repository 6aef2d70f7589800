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
  link.run(600, 110, 112);
  EXPECT(link.count.all());  // the second half of the trial
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
  link.run(3000, 5, 112);
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
