// The channel between a rank and its daemon, both ends in this process: memory, requests, bad requests, death.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "base/clock.h"
#include "channel/client.h"
#include "channel/server.h"
#include "harness.h"

namespace bagua {
namespace {

std::string socket_path() {
  static std::atomic<int> next{0};
  return "/tmp/bagua-test-" + std::to_string(getpid()) + "-" + std::to_string(next++) + ".sock";
}

// Knows one rank with a token of zeros; remembers what happened.
class FakeEngine final : public ChannelHandler {
 public:
  FakeEngine() {
    EXPECT_OK(Mapping::create(sizeof(JobPage), &page_fd_, &page_));
    EXPECT_OK(Mapping::create(kGenerationBytes, &sheet_fd_, &sheet_, Pages::kOnDemand));
    EXPECT_OK(Mapping::create(sizeof(RankChannel), &channel_fd_, &channel_));
    new (page_->data()) JobPage();
    new (sheet_->data()) GenerationPage();
    new (channel_->data()) RankChannel();
    sheet()->generation = 1;
    sheet()->hosts = 1;
    sheet()->world_size = 64;
    sheet()->local_ranks = 64;  // clients do not spin
    for (uint32_t rank = 0; rank < 64; ++rank) sheet()->places[rank] = {0, rank};
  }

  Status join(uint32_t member, const uint8_t* token, pid_t, Fd descriptors[3]) override {
    if (member != 3 || token[0] != 0) return {Code::kInvalid, "who are you?"};
    descriptors[0] = duplicate(page_fd_.get());
    descriptors[1] = duplicate(sheet_fd_.get());
    descriptors[2] = duplicate(channel_fd_.get());
    return Status::ok();
  }
  Status require(int, uint64_t bytes) override {
    return bytes <= 4096 ? Status::ok() : Status(Code::kResource, "too much");
  }
  Status alloc(int, uint64_t bytes, bool for_peers, Fd* descriptor, uint64_t* id, uint64_t* size) override {
    std::shared_ptr<Mapping> memory;
    if (Status status = Mapping::create(bytes, descriptor, &memory); !status) return status;
    if (for_peers) lent_ = duplicate(descriptor->get());
    memory->data()[0] = 42;
    *id = 9;
    *size = memory->bytes();
    return Status::ok();
  }
  Status borrow(int, uint32_t owner, uint64_t id, Fd* descriptor, uint64_t* size) override {
    if (owner != 5 || id != 9 || !lent_.valid()) return {Code::kInvalid, "nothing is lent"};
    *descriptor = duplicate(lent_.get());
    *size = 4096;
    return Status::ok();
  }
  Status adopt(int, uint64_t id, const Fd& memory) override {
    std::shared_ptr<Mapping> mapping;
    if (Status status = Mapping::adopt(memory.get(), &mapping); !status) return status;
    std::lock_guard<std::mutex> lock(mutex);
    adopted[id] = mapping->data()[1];
    return Status::ok();
  }
  Status free_segment(int, uint64_t id) override { return id == 9 ? Status::ok() : Status(Code::kInvalid, "unknown"); }
  Status declare(int, uint64_t, uint32_t, const std::vector<int>& members, uint32_t* room) override {
    std::lock_guard<std::mutex> lock(mutex);
    declared = members;
    *room = 0;
    return Status::ok();
  }
  Status destroy(int, uint64_t, uint32_t) override { return Status::ok(); }
  Status enter(int, uint64_t, Fd*) override { return {Code::kTimeout, "never"}; }
  void left(int, const std::string& words) override {
    std::lock_guard<std::mutex> lock(mutex);
    last_words = words;
    ++left_count;
  }
  void failed(int, pid_t, bool, const std::string& text) override {
    std::lock_guard<std::mutex> lock(mutex);
    last_words = text;
    ++failed_count;
  }
  void lost(int, pid_t) override { ++lost_count; }
  void bad_connection() override { ++bad_count; }
  void scarce(const std::string&) override { ++scarce_count; }

  GenerationPage* sheet() { return reinterpret_cast<GenerationPage*>(sheet_->data()); }
  RankChannel* channel() { return reinterpret_cast<RankChannel*>(channel_->data()); }

  std::atomic<int> left_count{0}, failed_count{0}, lost_count{0}, bad_count{0}, scarce_count{0};
  std::mutex mutex;
  std::vector<int> declared;
  std::string last_words;
  std::map<uint64_t, int> adopted;  // segment -> its second byte

 private:
  Fd page_fd_, sheet_fd_, channel_fd_, lent_;
  std::shared_ptr<Mapping> page_, sheet_, channel_;
};

struct Rig {
  Rig() : path(socket_path()), server(path, &engine) { CHECK_OK(server.start()); }
  std::unique_ptr<ChannelClient> join() {
    const uint8_t token[kTokenBytes] = {};
    std::unique_ptr<ChannelClient> client;
    CHECK_OK(ChannelClient::connect(path, token, 3, 5 * kNsPerS, &client));
    return client;
  }
  Fd stranger() {
    sockaddr_un address;
    CHECK_OK(unix_address(path, &address));
    Fd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    CHECK_EQ(connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    return fd;
  }

  FakeEngine engine;
  const std::string path;
  ChannelServer server;
};

template <class F>
bool eventually(F condition) {
  const int64_t deadline = now_ns() + 10 * kNsPerS;
  while (!condition()) {
    if (now_ns() > deadline) return false;
    usleep(1000);
  }
  return true;
}

}  // namespace

TEST(memory_is_sealed) {
  Fd fd;
  std::shared_ptr<Mapping> memory;
  CHECK_OK(Mapping::create(5000, &fd, &memory));
  CHECK_EQ(memory->bytes(), size_t{8192});
  CHECK(ftruncate(fd.get(), 4096) != 0);
  CHECK(ftruncate(fd.get(), 1 << 20) != 0);
  CHECK(fcntl(fd.get(), F_ADD_SEALS, F_SEAL_WRITE) != 0);
  std::shared_ptr<Mapping> other;
  CHECK_OK(Mapping::open(fd.get(), 8192, &other));
  memory->data()[100] = 7;
  CHECK_EQ(int{other->data()[100]}, 7);
  CHECK(!Mapping::open(fd.get(), 8193, &other));
  CHECK(!Mapping::create(size_t{1} << 50, &fd, &memory));
}

TEST(requests_are_answered) {
  Rig rig;
  struct stat info;
  CHECK_EQ(stat(rig.path.c_str(), &info), 0);
  CHECK_EQ(info.st_mode & 0777, mode_t{0600});
  auto client = rig.join();
  ChannelClient::Allocation allocation;
  CHECK_OK(client->alloc(100, &allocation));
  CHECK_EQ(allocation.id, uint64_t{9});
  CHECK_EQ(int{allocation.memory->data()[0]}, 42);
  ChannelClient::Allocation borrowed;
  CHECK_EQ(client->borrow(5, 9, &borrowed).message(), std::string("nothing is lent"));
  CHECK_OK(client->alloc(100, &allocation, true));
  allocation.memory->data()[1] = 7;
  CHECK_OK(client->borrow(5, 9, &borrowed));
  CHECK_EQ(int{borrowed.memory->data()[1]}, 7);
  CHECK_OK(client->require(4096));
  CHECK_EQ(client->require(4097).message(), std::string("too much"));
  CHECK_OK(client->free_segment(9));
  CHECK_EQ(client->free_segment(8).message(), std::string("unknown"));
  std::vector<int> members;
  for (int i = 0; i < 8192; ++i) members.push_back(i * 2);
  CHECK_OK(client->create_comm(7, members, kNsPerS));
  {
    std::lock_guard<std::mutex> lock(rig.engine.mutex);
    CHECK(rig.engine.declared == members);
  }
  client->close();
  CHECK(eventually([&] { return rig.engine.left_count == 1; }));
  CHECK_EQ(rig.engine.lost_count.load(), 0);
  CHECK(!client->alloc(1, &allocation));
}

TEST(a_killed_rank_is_lost_once) {
  Rig rig;
  const pid_t child = fork();
  if (child == 0) {
    auto client = rig.join();
    raise(SIGKILL);
  }
  CHECK(eventually([&] { return rig.engine.lost_count == 1; }));
  int status = 0;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK_EQ(status, SIGKILL);
  auto client = rig.join();  // the server has looked at its other descriptors meanwhile
  CHECK_EQ(rig.engine.lost_count.load(), 1);
}

TEST(garbage_costs_only_its_connection) {
  Rig rig;
  auto client = rig.join();
  std::mt19937 random(1);
  std::vector<Fd> held;
  for (int i = 0; i < 200; ++i) {
    held.push_back(rig.stranger());
    std::string bytes(1 + random() % 3000, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    if (i % 2 == 0 && bytes.size() > 8) {
      const uint32_t head[2] = {kProtocolMagic, static_cast<uint32_t>(random() % 8)};
      memcpy(bytes.data(), head, sizeof head);
    }
    static_cast<void>(send_packet(held.back().get(), bytes.data(), bytes.size(), nullptr, 0));
  }
  CHECK(eventually([&] { return rig.engine.bad_count >= 200; }));
  CHECK_OK(client->free_segment(9));
  CHECK_EQ(rig.engine.lost_count.load(), 0);
}

TEST(connections_wait_for_descriptors) {
  Rig rig;
  auto client = rig.join();
  const Fd late(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un address;
  CHECK_OK(unix_address(rig.path, &address));
  CHECK_OK(client->require(4096));  // so the server has closed its copies of what it sent before
  {
    const test::NoDescriptors none;
    CHECK_EQ(connect(late.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    CHECK(eventually([&] { return rig.engine.scarce_count == 1; }));
    EXPECT(test::busy_share() < 0.2);
    CHECK_OK(client->require(4096));  // who is here is served
    EXPECT_EQ(client->create_comm(7, {3}, kNsPerS).code(), Code::kOk);
    ChannelClient::Allocation allocation;
    EXPECT_EQ(client->alloc(100, &allocation).code(), Code::kResource);
    EXPECT_EQ(rig.engine.scarce_count.load(), 1);
  }
  Request request{};
  request.magic = 1;
  CHECK_OK(send_packet(late.get(), &request, sizeof request, nullptr, 0));
  CHECK(eventually([&] { return rig.engine.bad_count == 1; }));  // so it was accepted, and read
  ChannelClient::Allocation allocation;
  CHECK_OK(client->alloc(100, &allocation));
}

TEST(slots_are_used_in_any_order) {
  Rig rig;
  auto client = rig.join();
  RankChannel* channel = rig.engine.channel();
  std::vector<uint64_t> tickets(kSlots);
  for (int round = 0; round < 3; ++round) {
    for (uint64_t& ticket : tickets) CHECK_OK(client->submit(Descriptor{}, &ticket));
    uint64_t one_more;
    CHECK(!client->submit(Descriptor{}, &one_more));
    bool done = true;
    CHECK_OK(client->done(tickets[5], &done));
    CHECK(!done);
    ChannelClient::Times times;
    CHECK(client->wait(tickets[5], now_ns() + kNsPerMs, nullptr, &times).code() == Code::kTimeout);
    for (uint32_t i = 0; i < kSlots; ++i) channel->slots[i].state.store(kDone);
    for (size_t i = kSlots; i > 0; --i) CHECK_OK(client->wait(tickets[i - 1], -1, nullptr, &times));
    CHECK(client->wait(tickets[0], -1, nullptr, &times).code() == Code::kInvalid);
  }
  CHECK_EQ(channel->tail.load(), uint64_t{3 * kSlots});
}

TEST(a_wait_ends_with_the_daemon) {
  Rig rig;
  auto client = rig.join();
  uint64_t ticket;
  CHECK_OK(client->submit(Descriptor{}, &ticket));
  test::Threads threads;
  threads.start([&] {
    ChannelClient::Times times;
    const Status status = client->wait(ticket, -1, nullptr, &times);
    CHECK(status.message().find("the node daemon is gone") != std::string::npos);
  });
  usleep(20'000);
  rig.server.stop();
  threads.join();
}

TEST(a_rank_of_an_elastic_job_comes_back_with_its_memory) {
  const std::string path = socket_path();
  const uint8_t token[kTokenBytes] = {};
  auto engine = std::make_unique<FakeEngine>();
  engine->sheet()->elastic = 1;
  auto server = std::make_unique<ChannelServer>(path, engine.get());
  CHECK_OK(server->start());
  std::unique_ptr<ChannelClient> client;
  CHECK_OK(ChannelClient::connect(path, token, 3, 5 * kNsPerS, &client));
  ChannelClient::Allocation segment;
  CHECK_OK(client->alloc(4096, &segment));
  segment.memory->data()[1] = 77;
  uint64_t waited, forgotten;
  CHECK_OK(client->submit(Descriptor(), &waited));
  CHECK_OK(client->submit(Descriptor(), &forgotten));
  server.reset();
  engine.reset();
  ChannelClient::Times times;
  CHECK_EQ(client->wait(waited, -1, nullptr, &times).code(), Code::kRegrouped);
  CHECK_EQ(client->create_comm(1, {3}, kNsPerS).code(), Code::kRegrouped);
  CHECK_EQ(client->enter(now_ns() + kNsPerS / 20, nullptr).code(), Code::kTimeout);  // nobody is there

  FakeEngine next;
  next.sheet()->elastic = 1;
  next.sheet()->generation = 2;
  ChannelServer again(path, &next);
  CHECK_OK(again.start());
  CHECK_OK(client->enter(now_ns() + 10 * kNsPerS, nullptr));
  CHECK_EQ(client->generation(), uint64_t{2});
  {
    std::lock_guard<std::mutex> lock(next.mutex);
    CHECK_EQ(next.adopted.size(), size_t{1});
    CHECK_EQ(next.adopted[segment.id], 77);
  }
  CHECK_EQ(client->wait(forgotten, -1, nullptr, &times).code(), Code::kRegrouped);
  uint64_t ticket;
  CHECK_OK(client->submit(Descriptor(), &ticket));
  CHECK_EQ(next.channel()->tail.load(), uint64_t{1});
  client->close();
}

TEST(memory_that_can_be_cut_is_not_taken) {
  Fd file(memfd_create("bagua-test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  CHECK_EQ(ftruncate(file.get(), 4096), 0);
  std::shared_ptr<Mapping> memory;
  CHECK_EQ(Mapping::adopt(file.get(), &memory).code(), Code::kInvalid);
}

TEST(the_first_error_fails_submissions) {
  Rig rig;
  auto client = rig.join();
  memcpy(rig.engine.sheet()->error.text, "broken", 6);
  rig.engine.sheet()->error.length = 6;
  rig.engine.sheet()->status.store(kGenerationFailed);
  uint64_t ticket;
  CHECK_EQ(client->submit(Descriptor{}, &ticket).message(), std::string("broken"));
  CHECK_EQ(client->error(), std::string("broken"));
}

}  // namespace bagua
