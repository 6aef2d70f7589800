// The GPU leg and all its threads over the fakes, ranks as threads of one process, each with a device of its own: for
// the sanitizers. What it computes is tested in tests/integration/device.
#include "gpu/leg/leg.h"

#include <dlfcn.h>

#include <cmath>
#include <cstdlib>

#include "base/clock.h"
#include "channel/host_api.h"
#include "engine/engine_rig.h"

// The loader frees variables of dead threads, unseen by the sanitizer.
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_suppressions() {
  return "race:_dl_deallocate_tls\n";
}

namespace bagua::test {
namespace {

using device::Leg;
using device::LegOptions;

const std::vector<std::vector<int>> kOneHost = {{0, 1}}, kTwoHosts = {{0, 1}, {2, 3}};

template <class F>
F* fake(const char* name) {
  static void* const library = dlopen(getenv("BAGUA_DEVICE_CUDART"), RTLD_NOW);
  return reinterpret_cast<F*>(dlsym(library, name));
}
template <class F>
F* fake_nccl(const char* name) {
  static void* const library = dlopen(getenv("BAGUA_DEVICE_NCCL"), RTLD_NOW);
  return reinterpret_cast<F*>(dlsym(library, name));
}

// Before there are threads: the loader is not instrumented, and sanitizers see races in it.
[[maybe_unused]] const device::Libraries opened = device::open_libraries("");

void no_misuse() {
  EXPECT_EQ(std::string(fake<const char*()>("fake_cuda_first_misuse")()), "");
  EXPECT_EQ(std::string(fake_nccl<const char*()>("fake_nccl_first_misuse")()), "");
}

Status make_leg(Rank* rank, int device, const std::vector<std::vector<int>>& hosts, const std::string& route,
                std::unique_ptr<Leg>* leg) {
  LegOptions options;
  options.device = device;
  options.me = rank->rank();
  options.hosts = hosts;
  options.route = route;
  return Leg::create(host_api(&rank->client()), options, leg);
}

// A rank's leg, and a stream of the user's.
class User {
 public:
  User(Rank* rank, const std::vector<std::vector<int>>& hosts, const std::string& route) : rank_(rank->rank()) {
    stream_ = new_stream();
    CHECK_OK(make_leg(rank, rank_, hosts, route, &leg_));
    for (const auto& there : hosts) ranks_ += static_cast<int>(there.size());
  }

  void* new_stream() {
    void* made = nullptr;
    fake<int(int)>("cudaSetDevice")(rank_);
    CHECK_EQ(fake<int(void**, unsigned, int)>("cudaStreamCreateWithPriority")(&made, 1, 0), 0);
    return made;
  }
  uint64_t start(Kind kind, float* data, uint64_t count, uint32_t comm = 0, Codec codec = Codec{},
                 void* stream = nullptr) {
    Descriptor d{};
    d.kind = static_cast<uint8_t>(kind);
    d.comm = comm;
    d.count = count;
    d.root = kind == Kind::kAllReduce ? -1 : kind == Kind::kSend || kind == Kind::kRecv ? rank_ ^ 1 : 0;
    d.codec = static_cast<uint8_t>(codec);
    d.residual = d.codec != 0 ? 3 : 0;
    uint64_t ticket = 0;
    CHECK_OK(leg_->submit(d, data, data, stream == nullptr ? stream_ : stream, &ticket));
    return ticket;
  }
  // The stream waits, and then the host, by means of the fake.
  void finish(const std::vector<uint64_t>& tickets, void* stream = nullptr) {
    for (const uint64_t ticket : tickets) {
      CHECK_OK(leg_->wait(ticket, stream == nullptr ? stream_ : stream));
      leg_->release(ticket);
    }
    drain(stream);
  }
  void drain(void* stream = nullptr) { fake<void(void*)>("fake_cuda_drain")(stream == nullptr ? stream_ : stream); }
  void all_reduce(uint64_t count, uint32_t comm = 0, Codec codec = Codec{}, void* stream = nullptr) {
    std::vector<float> data(count, static_cast<float>(rank_ + 1));
    finish({start(Kind::kAllReduce, data.data(), count, comm, codec, stream)}, stream);
    for (const float value : data) CHECK_EQ(value, static_cast<float>(ranks_ * (ranks_ + 1) / 2));
  }

  bool drain_with_the_lock() { return fake<int(void*)>("fake_cuda_drain_with_the_lock")(stream_) != 0; }

  Leg& leg() { return *leg_; }
  int ranks() const { return ranks_; }
  std::vector<int> everyone() const {
    std::vector<int> out;
    for (int rank = 0; rank < ranks_; ++rank) out.push_back(rank);
    return out;
  }
  void* stream() const { return stream_; }

 private:
  const int rank_;
  int ranks_ = 0;
  void* stream_ = nullptr;
  std::unique_ptr<Leg> leg_;
};

void work(User* user) {
  std::vector<std::vector<float>> buckets;
  for (uint64_t i = 1; i <= 4; ++i) buckets.emplace_back(1000 * i, 1.0f);
  for (int step = 0; step < 5; ++step) {
    std::vector<uint64_t> tickets;
    for (auto& bucket : buckets) tickets.push_back(user->start(Kind::kAllReduce, bucket.data(), bucket.size()));
    user->finish(tickets);
  }
  for (const auto& bucket : buckets) {
    for (const float value : bucket) CHECK_EQ(value, std::pow(static_cast<float>(user->ranks()), 5.0f));
  }
  user->finish({user->start(Kind::kBroadcast, buckets[0].data(), 1000), user->start(Kind::kBarrier, nullptr, 0)});
  user->finish({user->start(Kind::kSend, buckets[0].data(), 500), user->start(Kind::kRecv, buckets[1].data(), 500)});
  for (int round = 0; round < 2; ++round) {
    CHECK_OK(user->leg().create_comm(7, user->everyone()));
    user->all_reduce(3000, 7);
    CHECK_OK(user->leg().destroy_comm(7));
  }
}

void on_route(const char* route, const std::vector<std::vector<int>>& hosts) {
  Job job(hosts);
  job.each([&](Rank& rank) {
    User user(&rank, hosts, route);
    work(&user);
    user.leg().close();
  });
  no_misuse();
}

// NCCL's communicators don't block while it lives.
class NotBlocking {
 public:
  NotBlocking() { setenv("BAGUA_NCCL_BLOCKING", "0", 1); }
  ~NotBlocking() { unsetenv("BAGUA_NCCL_BLOCKING"); }
};

TEST(routes) {
  on_route("staged", kTwoHosts);
  on_route("flat", kOneHost);
  on_route("hierarchical", kTwoHosts);
  const NotBlocking alone;
  on_route("flat", kOneHost);
  on_route("hierarchical", kTwoHosts);
}

// Each communicator has a thread that submits; another one asks.
TEST(several_threads) {
  Job job(kOneHost);
  job.each([](Rank& rank) {
    User user(&rank, kOneHost, "");
    for (uint32_t comm = 1; comm <= 2; ++comm) CHECK_OK(user.leg().create_comm(comm, {0, 1}));
    std::atomic<bool> over{false};
    Threads asking, submitting;
    asking.start([&] {
      while (!over) {
        EXPECT_EQ(user.leg().error(), "");
        device::Times times;
        bool done = false;
        static_cast<void>(user.leg().done((1u << 20) + 1, &done));  // a ticket that may live
        static_cast<void>(user.leg().times((1u << 20) + 1, &times));
        EXPECT(user.leg().waiting().since_ns <= now_ns());
        usleep(100);
      }
    });
    for (uint32_t comm = 1; comm <= 2; ++comm) {
      submitting.start([&user, comm] {
        // Ranks come to the two communicators in different orders: one stream would wait for both.
        void* const stream = user.new_stream();
        for (int i = 0; i < 10; ++i) user.all_reduce(1000, comm, Codec{}, stream);
      });
    }
    submitting.join();
    over = true;
  });
  no_misuse();
}

// Lanes of several communicators queue up for room at the daemon, and an abort ends those that still do.
TEST(beyond_the_slots_of_the_daemon) {
  Job job(kOneHost);
  std::atomic<int> ready{0};
  job.each([&](Rank& rank) {
    std::vector<float> data(1100, 1.0f);
    User user(&rank, kOneHost, "staged");
    for (uint32_t comm = 1; comm <= 2; ++comm) CHECK_OK(user.leg().create_comm(comm, {0, 1}));
    const auto submit_all = [&] {
      std::vector<uint64_t> tickets;
      for (size_t i = 0; i < data.size(); ++i) {
        tickets.push_back(user.start(Kind::kAllReduce, &data[i], 1, 1 + static_cast<uint32_t>(i % 2)));
      }
      return tickets;
    };
    while (rank.rank() == 1 && ready == 0) usleep(1000);
    const auto tickets = submit_all();
    ++ready;
    user.finish(tickets);
    for (const float value : data) EXPECT_EQ(value, 2.0f);
    while (ready < 2) usleep(1000);
    if (rank.rank() == 0) submit_all();
    if (rank.rank() == 0) job.engine(0).abort("the moon fell");
    while (user.leg().error().empty()) usleep(1000);
    user.drain();
    user.leg().close();
  });
  no_misuse();
}

void end_by_abort(const char* route, const std::vector<std::vector<int>>& hosts, bool nccl_hangs) {
  Job job(hosts);
  std::atomic<int> ready{0};
  job.each([&](Rank& rank) {
    User user(&rank, hosts, route);
    CHECK_OK(user.leg().create_comm(7, user.everyone()));
    std::vector<float> data(4000, 1.0f), more(4000, 1.0f);
    user.all_reduce(2000);
    user.all_reduce(2000, 7);
    const bool takes_part = rank.rank() != 0 || nccl_hangs;
    if (++ready == user.ranks() && nccl_hangs) fake_nccl<void(int)>("fake_nccl_hang")(1);
    while (ready < user.ranks()) usleep(1000);
    usleep(10'000);
    if (takes_part) {
      CHECK_OK(user.leg().wait(user.start(Kind::kAllReduce, data.data(), 4000), nullptr));
      user.start(Kind::kAllReduce, more.data(), 4000, 7);
    }
    if (++ready == 2 * user.ranks()) job.engine(0).abort("the moon fell");
    while (user.leg().error().empty()) usleep(1000);
    EXPECT_EQ(user.leg().error(), "the moon fell [BG502]");
    user.drain();
    user.leg().close();  // what was set free writes to `data` no more
  });
  if (nccl_hangs) fake_nccl<void(int)>("fake_nccl_hang")(0);
  no_misuse();
}

TEST(aborted) {
  end_by_abort("staged", kTwoHosts, false);
  end_by_abort("hierarchical", kTwoHosts, false);
  end_by_abort("flat", kOneHost, false);
  end_by_abort("flat", kOneHost, true);
  const NotBlocking alone;
  end_by_abort("flat", kOneHost, false);
  end_by_abort("flat", kOneHost, true);
}

// A call of the rank's holds the context's lock until its stream has both results. So nobody may call CUDA between
// them.
TEST(results_while_a_call_holds_the_context) {
  Job job(kOneHost);
  std::atomic<bool> holding{false};
  job.each([&](Rank& rank) {
    User user(&rank, kOneHost, "staged");
    user.all_reduce(1000);
    std::vector<float> first(1000, 1.0f), second(1000, 1.0f);
    while (rank.rank() == 1 && !holding) usleep(1000);
    if (rank.rank() == 1) usleep(50'000);
    const uint64_t tickets[] = {user.start(Kind::kAllReduce, first.data(), 1000),
                                user.start(Kind::kAllReduce, second.data(), 1000)};
    for (const uint64_t ticket : tickets) CHECK_OK(user.leg().wait(ticket, user.stream()));
    if (rank.rank() == 0) holding = true;
    EXPECT(user.drain_with_the_lock());
    EXPECT_EQ(second[999], 2.0f);
  });
  no_misuse();
}

// One holds the context's lock until its stream is idle, which stands behind a kernel of NCCL that only an abort ends.
TEST(aborted_while_a_call_holds_the_context) {
  Job job(kOneHost);
  std::atomic<int> holding{0};
  job.each([&](Rank& rank) {
    User user(&rank, kOneHost, "flat");
    std::vector<float> data(1000, 1.0f);
    user.all_reduce(1000);
    fake_nccl<void(int)>("fake_nccl_hang")(1);
    CHECK_OK(user.leg().wait(user.start(Kind::kAllReduce, data.data(), 1000), user.stream()));
    Threads aborting;
    if (rank.rank() == 0) {
      aborting.start([&] {
        while (holding < 2) usleep(1000);
        // The watcher looks, and hangs; that is known to whoever asks.
        const int64_t deadline = now_ns() + 4 * kNsPerS;
        while (user.leg().waiting().since_ns == 0 && now_ns() < deadline) usleep(1000);
        EXPECT(now_ns() < deadline);
        job.engine(0).abort("the moon fell");
      });
    }
    ++holding;
    EXPECT(user.drain_with_the_lock());
    while (user.leg().error().empty()) usleep(1000);
    user.leg().close();
  });
  fake_nccl<void(int)>("fake_nccl_hang")(0);
  no_misuse();
}

// `close` asks CUDA nothing before it has aborted.
TEST(closed_while_a_call_holds_the_context) {
  Job job(kOneHost);
  job.each([&](Rank& rank) {
    User user(&rank, kOneHost, "flat");
    std::vector<float> data(1000, 1.0f);
    user.all_reduce(1000);
    fake_nccl<void(int)>("fake_nccl_hang")(1);
    CHECK_OK(user.leg().wait(user.start(Kind::kAllReduce, data.data(), 1000), user.stream()));
    Threads holding;
    holding.start([&] { EXPECT(user.drain_with_the_lock()); });
    while (user.leg().waiting().since_ns == 0) usleep(1000);
    usleep(1'500'000);
    user.leg().close();
    holding.join();
  });
  fake_nccl<void(int)>("fake_nccl_hang")(0);
  no_misuse();
}

// From threads that have no device, and go back to none.
void contexts_on_the_own_device(const char* route) {
  Job job(kOneHost);
  fake<void()>("fake_cuda_forget_contexts")();
  job.each([&](Rank& rank) {
    std::unique_ptr<Leg> leg;
    CHECK_OK(make_leg(&rank, 4 + rank.rank(), kOneHost, route, &leg));
    std::vector<float> data(1000, 1.0f);
    Descriptor d{};
    d.kind = static_cast<uint8_t>(Kind::kAllReduce);
    d.count = data.size();
    d.root = -1;
    uint64_t ticket = 0;
    CHECK_OK(leg->submit(d, data.data(), data.data(), nullptr, &ticket));
    CHECK_OK(leg->wait(ticket, nullptr));
    static_cast<void>(leg->waiting());
    for (bool over = false; !over;) CHECK_OK(leg->done(ticket, &over));
    leg->close();
  });
  EXPECT_EQ(fake<uint64_t()>("fake_cuda_contexts")(), 0x30u);
  no_misuse();
}

TEST(contexts) {
  contexts_on_the_own_device("staged");
  contexts_on_the_own_device("flat");
}

// A late question returns the time of the end, but for a round of the watcher; and nothing once it was released.
void asked_late(const char* route) {
  Job job(kOneHost);
  job.each([route](Rank& rank) {
    User user(&rank, kOneHost, route);
    std::vector<float> data(1000, 1.0f);
    const uint64_t ticket = user.start(Kind::kAllReduce, data.data(), data.size());
    CHECK_OK(user.leg().wait(ticket, user.stream()));
    user.drain();
    const int64_t over = now_ns();
    usleep(800'000);
    device::Times times;
    CHECK_OK(user.leg().times(ticket, &times));
    EXPECT(times.started_ns != 0 && times.done_ns >= times.started_ns);
    EXPECT(times.done_ns < over + 600 * kNsPerMs);
    user.leg().release(ticket);
    CHECK_OK(user.leg().times(ticket, &times));
    EXPECT(times.submitted_ns == 0 && times.started_ns == 0 && times.done_ns == 0);
  });
  no_misuse();
}

TEST(times) {
  asked_late("staged");
  asked_late("flat");
}

}  // namespace
}  // namespace bagua::test
