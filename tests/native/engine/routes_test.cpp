// Sends and receives with tags: programs may take a new tag for every message, as all-to-all does, and nothing of it
// may stay when it has arrived; and what is next on a route when named receives and those from any source meet there.
#include <atomic>
#include <memory>
#include <vector>

#include "engine/job/engine.h"
#include "engine/local/job_state.h"
#include "engine/remote/control.h"
#include "engine/remote/p2p.h"
#include "harness.h"

namespace bagua {

// Counts the routes and targets of sends and receives that are remembered.
struct Remembered {
  static size_t count(const Communicator& comm) NO_THREAD_SAFETY_ANALYSIS {
    return comm.lanes_.size() + comm.from_any_.size() + comm.touched_.size() + comm.sought_.size();
  }
  static size_t count(const PointToPoint& p2p) { return p2p.waiting_.size() + p2p.ready_.size() + p2p.sought_.size(); }
};

namespace {

constexpr uint32_t kTags = 1000;

// A port of one rank, whose memory is the test's.
struct OwnPort {
  std::unique_ptr<RankChannel> channel = std::make_unique<RankChannel>();
  Port port;

  OwnPort() {
    port.outstanding = std::make_unique<std::atomic<bool>[]>(kSlots);
    port.channel.store(channel.get());
  }
  bool done(const Operation& operation) const { return channel->slots[operation.slot].state.load() == kDone; }
  void clear() {
    for (Slot& slot : channel->slots) slot.state.store(kSubmitted);
  }
};

// Without elements, so that no byte has to move.
Operation operation(Kind kind, int rank, int other, uint32_t tag, OwnPort* port = nullptr, uint32_t slot = 0) {
  Operation made;
  made.port = port == nullptr ? nullptr : &port->port;
  made.rank = made.index = rank;
  made.slot = slot;
  made.descriptor.kind = static_cast<uint8_t>(kind);
  made.descriptor.root = other;
  made.descriptor.tag = tag;
  return made;
}

// Host 0 of two hosts with one rank each.
struct Sender {
  EngineOptions options;
  const Membership membership{3, 0, {{0}, {1}}};
  std::unique_ptr<JobState> job;
  std::unique_ptr<GenerationState> state;
  Communicator comm{0, {0, 1}, {{0}, {1}}, 0};
  std::unique_ptr<Mesh> mesh;
  std::unique_ptr<PointToPoint> p2p;
  OwnPort port;

  Sender() {
    options.tokens.emplace_back(0, std::vector<uint8_t>(kTokenBytes, 1));
    job = std::make_unique<JobState>(options);
    CHECK_OK(job->open());
    job->regroup({0}, options.tokens);
    state = std::make_unique<GenerationState>(job.get(), membership, nullptr);
    CHECK_OK(state->open());
    MeshOptions mesh_options;
    mesh_options.hosts = 2;
    mesh = std::make_unique<Mesh>(mesh_options);
    p2p = std::make_unique<PointToPoint>(state.get(), &comm, mesh.get());
    port.clear();
  }
  // As the dispatcher and the executor do it.
  void call(const Operation& one) {
    comm.push(one);
    Communicator::Between next;
    while (comm.next_between(&next)) {
      if (const auto* target = std::get_if<Communicator::Target>(&next)) {
        p2p->seek(*target);
      } else {
        CHECK_OK(p2p->add(std::get<SendOrRecv>(std::move(next))));
      }
    }
  }
  void send(uint32_t tag, uint32_t slot = 0) { call(operation(Kind::kSend, 0, 1, tag, &port, slot)); }
  void hear_ready(uint32_t tag) {
    Descriptor expected{};
    expected.kind = static_cast<uint8_t>(Kind::kRecv);
    expected.tag = tag;
    CHECK_OK(p2p->ready(1, {1, 0, 1, ++messages, expected}));
  }
  bool done(uint32_t slot) const { return port.channel->slots[slot].state.load() == kDone; }
  size_t remembered() const { return Remembered::count(comm) + Remembered::count(*p2p); }

  uint64_t messages = 0;
};

}  // namespace

TEST(nothing_stays_of_a_tag_inside_a_host) {
  Communicator comm(0, {0, 1, 2}, {{0, 1, 2}}, 0);
  for (uint32_t tag = 0; tag < kTags; ++tag) {
    Pair pair;
    Status mismatch;
    comm.push(operation(Kind::kSend, 0, 1, tag));
    EXPECT(!comm.next_pair(&pair, &mismatch));
    comm.push(operation(Kind::kSend, 2, 1, tag));
    comm.push(operation(Kind::kRecv, 1, 2, tag));
    comm.push(operation(Kind::kRecv, 1, kAnySource, tag));
    for (int i = 0; i < 2; ++i) {
      CHECK(comm.next_pair(&pair, &mismatch));
      EXPECT(mismatch);
      EXPECT_EQ(pair.recv.descriptor.root, pair.send.index);
    }
    EXPECT(!comm.next_pair(&pair, &mismatch));
    CHECK_EQ(Remembered::count(comm), size_t{0});
  }
}

TEST(nothing_stays_of_a_tag_between_hosts) {
  Sender sender;
  for (uint32_t tag = 0; tag < kTags; ++tag) {
    sender.port.clear();
    sender.send(tag);
    EXPECT(!sender.done(0));
    sender.hear_ready(tag);
    CHECK(sender.done(0));
    sender.hear_ready(tag);  // before the send is called
    sender.send(tag, 1);
    CHECK(sender.done(1));
    sender.call(operation(Kind::kRecv, 0, 1, tag, &sender.port, 2));
    CHECK(sender.done(2));
    CHECK_EQ(sender.remembered(), size_t{0});
  }
  EXPECT(sender.p2p->idle());
}

// Host 0 receives. What the other host tells of counts from the seek: receives before it have their sends.
TEST(an_offer_counts_from_the_seek) {
  Sender sender;
  const Communicator::Route route{1, 0, 5};
  SendOrRecv half;
  sender.call(operation(Kind::kRecv, 0, 1, 5, &sender.port, 0));
  EXPECT(!sender.comm.take_offered(route, 9, &half));  // nobody has sought
  sender.call(operation(Kind::kRecv, 0, kAnySource, 5, &sender.port, 1));
  EXPECT(sender.comm.awaits_any());
  sender.call(operation(Kind::kRecv, 0, 1, 5, &sender.port, 2));
  EXPECT(!sender.comm.take_offered(route, 1, &half));  // the named receive has it
  CHECK_OK(sender.p2p->on_offer(1, {1, 0, 5, 2}));
  EXPECT(sender.done(1));
  sender.port.clear();
  CHECK_OK(sender.p2p->on_offer(1, {1, 0, 5, 3}));
  sender.call(operation(Kind::kRecv, 0, kAnySource, 5, &sender.port, 3));  // of the send that was told before
  EXPECT(sender.done(3));
  sender.call(operation(Kind::kRecv, 0, kAnySource, 5, &sender.port, 4));
  EXPECT(!sender.done(4));
  EXPECT(sender.comm.awaits_any());
  sender.comm.drain();
}

}  // namespace bagua
