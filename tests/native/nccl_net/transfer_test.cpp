// Messages of all sizes through the plugin.
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>

#include "base/clock.h"
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

// One connection, and what a correct plugin would have done with it.
class Pipe {
 public:
  void send(size_t size) {
    Flight flight{sizes_.size(), nullptr, pattern(size, sizes_.size())};
    CHECK_EQ(net().isend(pair_.sender, flight.data.data(), size, 0, nullptr, nullptr, &flight.request), kSuccess);
    CHECK_EQ(flight.request == nullptr, sending_.size() == kMaxRequests);
    if (flight.request == nullptr) return;
    sizes_.push_back(size);
    sending_.push_back(std::move(flight));
  }
  void receive(size_t spare) {
    // A message that was not sent yet may be of any size.
    const size_t size = (posted_ < sizes_.size() ? sizes_[posted_] : kMost) + spare;
    Flight flight{posted_, reinterpret_cast<void*>(1), std::vector<uint8_t>(size, 0xee)};  // as NCCL leaves it for LL
    void* data = flight.data.data();
    size_t room = size;
    int tag = 0;
    CHECK_EQ(net().irecv(pair_.receiver, 1, &data, &room, &tag, nullptr, nullptr, &flight.request), kSuccess);
    CHECK_EQ(flight.request == nullptr, receiving_.size() == kMaxRequests);
    if (flight.request == nullptr) return;
    ++posted_;
    receiving_.push_back(std::move(flight));
  }
  // Asks for one of those that are under way, in any order, as NCCL may.
  void test(bool sends, size_t which) {
    std::vector<Flight>& flights = sends ? sending_ : receiving_;
    if (flights.empty()) return;
    Flight& flight = flights[which % flights.size()];
    int done = 0, size = -1;
    CHECK_EQ(net().test(flight.request, &done, &size), kSuccess);
    if (done == 0) return;
    CHECK(flight.message < sizes_.size());  // nothing comes that was not sent
    CHECK_EQ(static_cast<size_t>(size), sizes_[flight.message]);
    const std::vector<uint8_t> data = pattern(sizes_[flight.message], flight.message);
    CHECK(std::equal(data.begin(), data.end(), flight.data.begin()));
    CHECK(std::all_of(flight.data.begin() + size, flight.data.end(), [](uint8_t b) { return b == 0xee; }));
    std::swap(flight, flights.back());
    flights.pop_back();
  }
  // All that was sent arrives.
  void drain() {
    const int64_t deadline = now_ns() + 60 * kNsPerS;
    while (!sending_.empty() || posted_ < sizes_.size() ||
           std::any_of(receiving_.begin(), receiving_.end(), [&](auto& f) { return f.message < sizes_.size(); })) {
      if (posted_ < sizes_.size()) receive(0);
      for (size_t i = 0; i < kMaxRequests; ++i) test(true, i), test(false, i);
      CHECK(now_ns() < deadline);
    }
  }
  void end() { close(&pair_); }

  static constexpr size_t kMost = 400000;

 private:
  struct Flight {
    size_t message;
    void* request;
    std::vector<uint8_t> data;
  };
  Pair pair_ = connected();
  std::vector<size_t> sizes_;
  std::vector<Flight> sending_, receiving_;
  size_t posted_ = 0;
};

// All that NCCL may do with some connections, by chance.
TEST(connections_at_random) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 5; ++round) {
    std::vector<std::unique_ptr<Pipe>> pipes;
    pipes.push_back(std::make_unique<Pipe>());
    for (int step = 0; step < 400; ++step) {
      const size_t at = random() % pipes.size();
      const unsigned kind = random() % 40;
      if (kind == 0 && pipes.size() < 4) pipes.push_back(std::make_unique<Pipe>());
      if (kind == 1 && pipes.size() > 1) {  // with whatever is under way
        pipes[at]->end();
        pipes.erase(pipes.begin() + static_cast<ptrdiff_t>(at));
        continue;
      }
      Pipe& pipe = *pipes[at];
      if (kind < 8) pipe.send(kind < 3 ? 0 : random() % (kind < 5 ? 100 : kind < 7 ? 40000 : Pipe::kMost));
      if (kind >= 8 && kind < 15) pipe.receive(random() % 3);
      for (unsigned i = 0; kind >= 15 && i <= kind; ++i) pipe.test(kind % 2 == 0, random() % kMaxRequests);
    }
    for (const auto& pipe : pipes) {
      pipe->drain();
      pipe->end();
    }
  }
}

// Of several listeners, and of one that takes several, each connection has its own other end.
TEST(connections_that_are_made_side_by_side) {
  constexpr size_t kListeners = 16, kAll = kListeners + 3;
  char handles[kAll][kHandleBytes];
  Pair pairs[kAll];
  for (size_t i = 0; i < kListeners; ++i) {
    CHECK_EQ(net().listen(nullptr, 0, handles[i], &pairs[i].listener), kSuccess);
  }
  for (size_t i = kListeners; i < kAll; ++i) std::memcpy(handles[i], handles[0], kHandleBytes);
  std::vector<void*> of_first;
  for (size_t missing = kAll; missing > 0;) {
    for (size_t i = kAll; i-- > 0;) {
      if (pairs[i].sender != nullptr) continue;
      CHECK_EQ(net().connect(nullptr, 0, handles[i], &pairs[i].sender, nullptr), kSuccess);
      void* receiver = nullptr;
      Pair& to = pairs[i < kListeners ? i : 0];
      CHECK_EQ(net().accept(to.listener, &receiver, nullptr), kSuccess);
      if (receiver != nullptr && to.listener == pairs[0].listener) of_first.push_back(receiver);
      if (receiver != nullptr && to.listener != pairs[0].listener) to.receiver = receiver;
      if (pairs[i].sender != nullptr) --missing;
    }
  }
  std::vector<uint32_t> sent(kAll), got(kAll, ~0u);
  std::vector<void*> out, in;
  for (uint32_t i = 0; i < kAll; ++i) {
    sent[i] = i;
    if (i == 0 || i >= kListeners) pairs[i].receiver = of_first[i == 0 ? 0 : i - kListeners + 1];
    in.push_back(receive(pairs[i], &got[i], sizeof got[i]));
    out.push_back(send(pairs[i], &sent[i], sizeof sent[i]));
  }
  for (uint32_t i = 0; i < kAll; ++i) {
    CHECK_EQ(finish(out[i]), kSuccess);
    CHECK_EQ(finish(in[i]), kSuccess);
    if (i > 0 && i < kListeners) EXPECT_EQ(got[i], i);
  }
  std::sort(got.begin(), got.end());
  EXPECT(got == sent);  // those of one listener in any order
  for (Pair& pair : pairs) close(&pair);
}

TEST(the_older_table_carries_messages) {
  net();
  const NetV8& old = ncclNetPlugin_v8;
  Pair pair;
  char handle[kHandleBytes];
  CHECK_EQ(old.listen(0, handle, &pair.listener), kSuccess);
  while (pair.sender == nullptr || pair.receiver == nullptr) {
    if (pair.sender == nullptr) CHECK_EQ(old.connect(0, handle, &pair.sender, nullptr), kSuccess);
    if (pair.receiver == nullptr) CHECK_EQ(old.accept(pair.listener, &pair.receiver, nullptr), kSuccess);
  }
  std::vector<uint8_t> data = pattern(8000, 1), buffer(9000, 0xee);
  void* to = buffer.data();
  void *in = nullptr, *out = nullptr, *flush = nullptr;
  int room = 9000, tag = 0, size = 0;
  CHECK_EQ(old.irecv(pair.receiver, 1, &to, &room, &tag, nullptr, &in), kSuccess);
  CHECK_EQ(old.isend(pair.sender, data.data(), 8000, 0, nullptr, &out), kSuccess);
  CHECK_EQ(finish(out, &size), kSuccess);
  EXPECT_EQ(size, 8000);
  CHECK_EQ(finish(in, &size), kSuccess);
  EXPECT_EQ(size, 8000);
  EXPECT(std::equal(data.begin(), data.end(), buffer.begin()) && buffer[8000] == 0xee);
  CHECK_EQ(old.iflush(pair.receiver, 1, &to, &size, nullptr, &flush), kSuccess);
  EXPECT(flush == nullptr);  // memory of the host
  close(&pair);
}

// NCCL closes the library after the last communicator, and may open it again: no thread may run in what is gone.
TEST(the_library_is_closed_and_opened_again) {
  const char* const path = std::getenv("BAGUA_TEST_PLUGIN");
  if (path == nullptr) test::skip("BAGUA_TEST_PLUGIN does not name a plugin");
  net();
  const size_t threads = thread_count();
  for (int round = 0; round < 3; ++round) {
    void* const library = ::dlopen(path, RTLD_NOW | RTLD_LOCAL);
    CHECK(library != nullptr);
    use(static_cast<NetV11*>(::dlsym(library, "ncclNetPlugin_v11")));
    void* context = nullptr;
    CHECK_EQ(net().init(&context, 1, nullptr, nullptr, nullptr), kSuccess);
    Pair pair = connected();
    transfer(pair, 8 << 20, 0);
    close(&pair);
    CHECK_EQ(net().finalize(context), kSuccess);
    use(nullptr);
    CHECK_EQ(::dlclose(library), 0);
    const int64_t deadline = now_ns() + 30 * kNsPerS;
    while (thread_count() != threads) CHECK(now_ns() < deadline);
  }
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

}  // namespace
}  // namespace bagua::nccl_net::rig
