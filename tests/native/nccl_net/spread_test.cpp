// One data socket or all of them: that a host is tried where messages wait, and what follows from the verdict. What
// StreamCount makes of a trial is tested in tests/native/transport/stream_count_test.cpp. The plugin remembers verdicts
// until the process ends: this suite has one of its own.
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>

#include "base/clock.h"
#include "nccl_net/send.h"
#include "nccl_net/settings.h"
#include "rig.h"

namespace bagua::nccl_net::rig {
namespace {

constexpr size_t kMessage = (1 << 20) - 13;

// Messages on a connection whose receiver rests before each; each is compared. More are under way than sockets hold.
class Flow {
 public:
  void next(std::chrono::milliseconds rest) {
    while (begun_ - sent_ < kMaxRequests - 2) {
      sending_[begun_ % kMaxRequests] = send(pair_, content(begun_), kMessage);
      ++begun_;
    }
    const int64_t until = now_ns() + std::chrono::nanoseconds(rest).count();
    while (now_ns() < until) progress();
    void* in = receive(pair_, buffer_.data(), kMessage);
    for (int done = 0; done == 0; progress()) CHECK_EQ(net().test(in, &done, nullptr), kSuccess);
    CHECK(std::memcmp(buffer_.data(), content(taken_), kMessage) == 0);
    ++taken_;
  }
  void end() { close(&pair_); }

 private:
  // Messages differ in where they begin.
  const uint8_t* content(uint64_t message) const { return content_.data() + message * 997 % kShift; }
  void progress() {
    int done = 0;
    if (sent_ < begun_) CHECK_EQ(net().test(sending_[sent_ % kMaxRequests], &done, nullptr), kSuccess);
    sent_ += done != 0;
    std::this_thread::yield();
  }

  static constexpr size_t kShift = 64 << 10;
  Pair pair_ = connected();
  const std::vector<uint8_t> content_ = pattern(kMessage + kShift, 1);
  std::vector<uint8_t> buffer_ = std::vector<uint8_t>(kMessage);
  void* sending_[kMaxRequests] = {};
  uint64_t begun_ = 0, sent_ = 0, taken_ = 0;
};

// What a host decides whose connections have waited for some seconds from `now` on, and came to so many MB/s with one
// socket each and with all of theirs.
bool spreads_after(SendHost* host, int64_t now, double one, double all) {
  for (int i = 0; i < 3; ++i) host->tell(now, 1);
  for (int i = 0; i < 1000; ++i) {
    now += StreamCount::kLookNs;
    host->sent(static_cast<size_t>((host->spreads() ? all : one) * 5e3));
    host->tell(now, 0);
  }
  for (int i = 0; i < 3; ++i) host->tell(now, -1);
  return host->spreads();
}

TEST(a_host_is_judged_by_all_of_its_connections) {
  const int64_t now = kNsPerS;
  EXPECT(spreads_after(SendHost::of("10.0.0.1:1"), now, 40, 150));
  EXPECT(SendHost::of("10.0.0.1:2")->spreads());  // a later connection, to another port
  EXPECT(!spreads_after(SendHost::of("10.0.0.2:1"), now, 110, 112));
  SendHost* const idle = SendHost::of("10.0.0.3:1");
  for (int64_t second = 1; second < 20; ++second) {
    idle->sent(StreamCount::kOneBytes);
    idle->tell(now + second * kNsPerS, 0);
    EXPECT(!idle->spreads());  // nothing was tried: nobody waited
  }
}

TEST(a_host_is_tried_where_messages_wait) {
  const SendHost* const host = SendHost::of("127.0.0.1:1");
  Flow flow;
  const int64_t deadline = now_ns() + 40 * kNsPerS;
  while (!host->spreads()) {
    flow.next(std::chrono::milliseconds(15));
    CHECK(now_ns() < deadline);
  }
  flow.end();
}

TEST(all_sockets_carry_where_a_host_spreads) {
  // After the verdict of the trial above. Connections that report earlier times do not change this one.
  CHECK(spreads_after(SendHost::of("127.0.0.1:1"), now_ns() + 2 * StreamCount::kHoldNs, 40, 150));
  Flow flow;
  for (int i = 0; i < 40; ++i) flow.next(std::chrono::milliseconds(2));
  flow.end();
  std::ifstream file(std::getenv("BAGUA_NET_STATS"));
  std::string line, last;
  while (std::getline(file, line)) last = line.find("\"send\"") != line.npos ? line : last;
  const std::string name = "\"stream_bytes\": [";
  CHECK(last.find(name) != last.npos);
  std::istringstream bytes(last.substr(last.find(name) + name.size()));
  int sockets = 0;
  for (uint64_t carried = 0; bytes >> carried; bytes.ignore()) {
    EXPECT(carried > 0);
    ++sockets;
  }
  EXPECT_EQ(sockets, settings().streams);
}

}  // namespace
}  // namespace bagua::nccl_net::rig
