// Messages of all sizes through the plugin.
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>
#include <string>

#include "rig.h"

namespace bagua::nccl_net::rig {
namespace {

// Sends one message into a buffer that is `spare` bytes larger; the bytes beyond it must stay.
void transfer(const Pair& pair, size_t size, size_t spare) {
  const std::vector<uint8_t> data = pattern(size, size);
  std::vector<uint8_t> buffer(size + spare, 0xee);
  void* in = receive(pair, buffer.data(), buffer.size());
  void* out = send(pair, data.data(), data.size());
  void* beside = nullptr;  // may be given back meanwhile
  CHECK_EQ(net().reg_mr(pair.receiver, buffer.data() + buffer.size(), 4096, kPtrHost, &beside), kSuccess);
  CHECK_EQ(net().dereg_mr(pair.receiver, beside), kSuccess);
  int sent = -1;
  int got = -1;
  bool sending = true;
  for (bool receiving = true; sending || receiving;) {
    int done = 0;
    if (sending) {
      CHECK_EQ(net().test(out, &done, &sent), kSuccess);
      sending = done == 0;
    }
    if (receiving) {
      CHECK_EQ(net().test(in, &done, &got), kSuccess);
      receiving = done == 0;
    }
  }
  CHECK_EQ(static_cast<size_t>(sent), size);
  CHECK_EQ(static_cast<size_t>(got), size);
  EXPECT(size == 0 || std::memcmp(data.data(), buffer.data(), size) == 0);
  EXPECT(std::all_of(buffer.begin() + static_cast<ptrdiff_t>(size), buffer.end(), [](uint8_t b) { return b == 0xee; }));
}

TEST(every_size_arrives_whole) {
  Pair pair = connected();
  for (const size_t size :
       {0u,     1u,      31u,     32u,     1000u,   4096u,    16352u,   16384u,   32767u, 32768u, 32769u,
        65536u, 131071u, 131072u, 131073u, 500000u, 1048576u, 3000001u, 8388608u, 0u,     1u}) {
    transfer(pair, size, 0);
    transfer(pair, size, 77);
  }
  close(&pair);
}

TEST(many_in_flight_of_mixed_sizes) {
  Pair pair = connected();
  std::mt19937_64 random(7);
  struct Flight {
    void* request;
    size_t size;
    std::vector<uint8_t> data;
  };
  std::vector<Flight> sending;
  std::vector<Flight> receiving;
  std::vector<size_t> sizes;
  for (int i = 0; i < 400; ++i) {
    const unsigned kind = random() % 4;
    sizes.push_back(kind == 0 ? 0 : random() % (kind == 1 ? 100 : kind == 2 ? 40000 : 600000));
  }
  size_t sent = 0;
  size_t posted = 0;
  while (sent < sizes.size() || !sending.empty() || !receiving.empty()) {
    if (sent < sizes.size() && random() % 2 == 0) {
      Flight flight{nullptr, sizes[sent], pattern(sizes[sent], sent)};
      CHECK_EQ(net().isend(pair.sender, flight.data.data(), flight.size, 0, nullptr, nullptr, &flight.request),
               kSuccess);
      CHECK_EQ(flight.request == nullptr, sending.size() == kMaxRequests);
      if (flight.request != nullptr) sending.push_back(std::move(flight)), ++sent;
    }
    if (posted < sizes.size() && random() % 2 == 0) {
      Flight flight{nullptr, posted, std::vector<uint8_t>(sizes[posted] + random() % 3)};
      void* data = flight.data.data();
      size_t size = flight.data.size();
      int tag = 0;
      CHECK_EQ(net().irecv(pair.receiver, 1, &data, &size, &tag, nullptr, nullptr, &flight.request), kSuccess);
      CHECK_EQ(flight.request == nullptr, receiving.size() == kMaxRequests);
      if (flight.request != nullptr) receiving.push_back(std::move(flight)), ++posted;
    }
    // In any order, as NCCL may.
    if (!sending.empty()) {
      const size_t at = random() % sending.size();
      int done = 0;
      CHECK_EQ(net().test(sending[at].request, &done, nullptr), kSuccess);
      if (done != 0) sending.erase(sending.begin() + static_cast<ptrdiff_t>(at));
    }
    if (!receiving.empty()) {
      const size_t at = random() % receiving.size();
      int done = 0;
      int size = -1;
      CHECK_EQ(net().test(receiving[at].request, &done, &size), kSuccess);
      if (done == 0) continue;
      const std::vector<uint8_t> data = pattern(sizes[receiving[at].size], receiving[at].size);
      CHECK_EQ(static_cast<size_t>(size), data.size());
      CHECK(data.empty() || std::memcmp(data.data(), receiving[at].data.data(), data.size()) == 0);
      receiving.erase(receiving.begin() + static_cast<ptrdiff_t>(at));
    }
  }
  close(&pair);
}

TEST(small_messages_pass_a_large_one_whose_end_waits) {
  Pair pair = connected();
  const std::vector<uint8_t> large = pattern(64 << 20, 1);
  const std::vector<uint8_t> small = pattern(100, 2);
  std::vector<uint8_t> large_in(large.size());
  std::vector<uint8_t> small_in(small.size());
  void* first = receive(pair, large_in.data(), large_in.size());
  void* second = receive(pair, small_in.data(), small_in.size());
  void* large_out = send(pair, large.data(), large.size());
  void* small_out = send(pair, small.data(), small.size());
  CHECK_EQ(finish(small_out), kSuccess);
  CHECK_EQ(finish(second), kSuccess);
  EXPECT(small == small_in);
  int done = 0;
  CHECK_EQ(net().test(large_out, &done, nullptr), kSuccess);
  EXPECT_EQ(done, 0);  // far more than sockets hold, and the receiver has hardly begun
  test::Threads threads;
  threads.start([&] { CHECK_EQ(finish(large_out), kSuccess); });
  CHECK_EQ(finish(first), kSuccess);
  threads.join();
  EXPECT(large == large_in);
  close(&pair);
}

// Hundredths of a second that threads of this process have computed: helpers, or this one.
long computed(bool helpers) {
  long ticks = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream file(entry.path() / "stat");
    std::string text((std::istreambuf_iterator<char>(file)), {});
    const size_t name = text.rfind(')');
    if (name == text.npos || (text.find("(bagua-net)") != text.npos) != helpers) continue;
    std::istringstream words(text.substr(name + 1));
    std::string word;
    for (int i = 0; i < 13 && words >> word; ++i) {  // 12 and 13: in user and system mode
      if (i >= 11) ticks += std::stol(word);
    }
  }
  return ticks;
}

TEST(helpers_sleep_while_only_small_messages_flow) {
  Pair pair = connected();
  transfer(pair, 8 << 20, 0);  // calls the helpers, if there are any
  const long helpers = computed(true);
  const long own = computed(false);
  char data[100] = {};
  char buffer[100];
  while (computed(false) - own < 30) {
    for (int i = 0; i < 200; ++i) {
      void* in = receive(pair, buffer, sizeof buffer);
      CHECK_EQ(finish(send(pair, data, sizeof data)), kSuccess);
      CHECK_EQ(finish(in), kSuccess);
    }
  }
  // One that spins gets as much time as this thread.
  EXPECT(4 * (computed(true) - helpers) < computed(false) - own);
  close(&pair);
}

TEST(a_message_waits_for_its_buffer) {
  Pair pair = connected();
  const std::vector<uint8_t> data = pattern(300000, 3);
  void* out = send(pair, data.data(), data.size());
  for (int i = 0; i < 100; ++i) {
    int done = 0;
    CHECK_EQ(net().test(out, &done, nullptr), kSuccess);
    if (done != 0) break;
  }
  std::vector<uint8_t> buffer(data.size());
  EXPECT_EQ(finish(receive(pair, buffer.data(), buffer.size())), kSuccess);
  EXPECT(data == buffer);
  close(&pair);
}

}  // namespace
}  // namespace bagua::nccl_net::rig
