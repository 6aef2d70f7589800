// The C functions through which the GPU leg uses a rank's channel.
#include "channel/host_api.h"

#include <cstring>

#include "engine_rig.h"

namespace bagua::test {
namespace {

TEST(a_wait_for_failure_ends_with_the_reason) {
  Job job({std::vector<int>{0}});
  Rank rank(job.socket(0), 0);
  const HostApi api = host_api(&rank.client());
  HostError error{};
  EXPECT_EQ(api.wait_failure(api.client, now_ns(), &error), kHostTimeout);
  std::atomic<int> nudged{0};
  Threads threads;
  threads.start([&] {
    int code = kHostOk;
    while ((code = api.wait_failure(api.client, -1, &error)) == kHostOk) ++nudged;
    EXPECT_EQ(code, kHostFailed);
  });
  while (nudged == 0) api.nudge(api.client);
  job.engine(0).abort("the moon fell");
  threads.join();
  EXPECT_EQ(std::string(error.text), "the moon fell [BG502]");
}

TEST(a_wait_for_failure_ends_when_the_rank_leaves) {
  Job job({std::vector<int>{0}});
  Rank rank(job.socket(0), 0);
  const HostApi api = host_api(&rank.client());
  rank.leave();
  HostError error{};
  EXPECT_EQ(api.wait_failure(api.client, -1, &error), kHostFailed);
  EXPECT(std::string(error.text).find("closed") != std::string::npos);
}

TEST(a_wait_can_be_interrupted) {
  Job job({std::vector<int>{0, 1}});
  Rank rank(job.socket(0), 0);
  const HostApi api = host_api(&rank.client());
  HostError error{};
  uint64_t ticket = 0;
  CHECK_OK(rank.start(Kind::kAllReduce, 16, -1, &ticket));  // the other one never comes
  std::atomic<bool> stop{true};
  const auto asked = [](void* context) { return static_cast<std::atomic<bool>*>(context)->load(); };
  EXPECT_EQ(api.wait(api.client, ticket, -1, asked, &stop, &error), kHostInterrupted);
}

}  // namespace
}  // namespace bagua::test
