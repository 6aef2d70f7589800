// The C functions through which the GPU leg uses a rank's channel.
#include "channel/host_api.h"

#include <cstring>

#include "engine_rig.h"

namespace bagua::test {
namespace {

TEST(an_operation_from_memory_to_result) {
  Job job({std::vector<int>{0}});
  job.each([](Rank& rank) {
    const HostApi api = host_api(&rank.client());
    HostError error{};
    uint64_t segment = 0, bytes = 0, ticket = 0;
    void* data = nullptr;
    CHECK_EQ(api.alloc(api.client, 5000, &segment, &data, &bytes, &error), kHostOk);
    EXPECT(bytes >= 5000);
    float* const values = static_cast<float*>(data);
    for (int i = 0; i < 1000; ++i) values[i] = static_cast<float>(i);
    const int32_t members[] = {0};
    CHECK_EQ(api.create_comm(api.client, 7, members, 1, kNsPerS, &error), kHostOk);
    Descriptor d{};
    d.kind = static_cast<uint8_t>(Kind::kAllReduce);
    d.comm = 7;
    d.count = 500;
    d.src_segment = d.dst_segment = static_cast<uint32_t>(segment);
    d.dst_offset = 2000;
    CHECK_EQ(api.submit(api.client, &d, &ticket, &error), kHostOk);
    CHECK_EQ(api.wait(api.client, ticket, -1, nullptr, nullptr, &error), kHostOk);
    EXPECT_EQ(memcmp(values, values + 500, 2000), 0);
    EXPECT_EQ(api.destroy_comm(api.client, 7, &error), kHostOk);
    EXPECT_EQ(api.free(api.client, segment, &error), kHostOk);
    EXPECT_EQ(api.encoded_bytes(static_cast<uint8_t>(Codec::kF16), 0, 100), 200u);
  });
}

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
