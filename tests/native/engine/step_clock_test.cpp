// How long a step takes, from the times at which its operations come again.
#include "engine/values/step_clock.h"

#include <cstring>

#include "base/clock.h"
#include "harness.h"

namespace bagua {
namespace {

Descriptor operation(const char* label, uint32_t comm = 0) {
  Descriptor descriptor{};
  std::strncpy(descriptor.label, label, sizeof descriptor.label - 1);
  descriptor.comm = comm;
  return descriptor;
}

TEST(no_step_is_known_until_an_operation_comes_again) {
  StepClock clock;
  clock.note(operation("bucket 0"), 0);
  clock.note(operation("bucket 1"), kNsPerMs);
  clock.note(operation("bucket 0", 1), 2 * kNsPerMs);
  EXPECT_EQ(clock.median(), int64_t{0});
  clock.note(operation("bucket 0"), kNsPerS);
  EXPECT_EQ(clock.median(), kNsPerS);
}

TEST(a_step_is_no_time_between_two_of_its_operations) {
  StepClock clock;
  for (int step = 0; step < 20; ++step) {
    for (int bucket = 0; bucket < 10; ++bucket) {
      const std::string label = "bucket " + std::to_string(bucket);
      clock.note(operation(label.c_str()), step * kNsPerS + bucket * 50 * kNsPerMs);
    }
  }
  EXPECT_EQ(clock.median(), kNsPerS);
}

TEST(one_long_step_is_not_the_median_and_the_old_are_forgotten) {
  StepClock clock;
  int64_t now = 0;
  const auto step = [&](int64_t length) { clock.note(operation("bucket"), now += length); };
  for (int i = 0; i < 10; ++i) step(kNsPerS);
  step(600 * kNsPerS);  // a checkpoint
  EXPECT_EQ(clock.median(), kNsPerS);
  for (int i = 0; i < 15; ++i) step(kNsPerMs);
  EXPECT_EQ(clock.median(), kNsPerMs);
}

TEST(passes_tell_the_time_of_a_step) {
  PassClock clock;
  EXPECT_EQ(clock.look(0, 1000), 0);
  EXPECT_EQ(clock.look(10, 900'000), 0);  // when the first began is not known
  EXPECT_EQ(clock.look(20, 902'000), 200);
  EXPECT_EQ(clock.look(20, 904'000), 200);
  EXPECT_EQ(clock.look(21, 990'000), 88'000);  // of two
  EXPECT_EQ(clock.look(31, 992'000), 200);     // a pause is not the median
  EXPECT_EQ(clock.look(3, 993'000), 200);      // other ranks
}

}  // namespace
}  // namespace bagua
