// One data socket or all of them, on real sockets: a relay stands for a network that limits each socket, or all of them
// together. It counts what each carries; nothing is decided by a clock but when to give up.
//
// The plugin remembers a host's trial until the process ends, so each test has hosts of its own, addresses of
// loopback.
#include <arpa/inet.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "base/clock.h"
#include "nccl_net/send.h"
#include "nccl_net/settings.h"
#include "nccl_net/wire.h"
#include "net/socket.h"
#include "rig.h"

namespace bagua::nccl_net::rig {
namespace {

constexpr size_t kMessage = (1 << 20) - 13;
constexpr size_t kWindow = 8;  // messages in flight, as NCCL
// Slow, so that under a sanitizer on a busy machine it is still the network that limits.
constexpr double kEachRate = 4e6;
constexpr double kSharedRate = 20e6;    // of each connection
constexpr uint64_t kSlice = 2'000'000;  // bytes of each connection that are looked at together
// More equal messages in a row than the longest part of a trial can carry, which is 0.5 s on one socket (10 MB where
// they share) or 0.25 s on all (4 MB where each is limited, and 2 MB that the kernel and the relay hold): it is
// decided.
constexpr int kSlices = 7;
constexpr uint64_t kApart = 8;  // messages after which the next of several connections begins
// A busy processor may mislead a trial, and its verdict would be believed for longer than the harness lets a test run.
// After that time another host is tried.
constexpr int64_t kPatienceNs = 13 * kNsPerS;
constexpr int kHosts = 3;

int64_t soon() {
  return now_ns() + 20 * kNsPerS;
}

// Limits the bytes per second of one socket, or of several together.
class Bucket {
 public:
  explicit Bucket(double rate) : rate_(rate) {}
  // Returns when so many more may pass.
  void take(size_t bytes) {
    int64_t free_at = 0;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      // A short pause is made up for: threads wait for a processor.
      free_at_ =
          std::max(free_at_, now_ns() - 20 * kNsPerMs) + static_cast<int64_t>(static_cast<double>(bytes) / rate_ * 1e9);
      free_at = free_at_;
    }
    std::this_thread::sleep_for(std::chrono::nanoseconds(free_at - now_ns()));
  }

 private:
  const double rate_;
  std::mutex mutex_;
  int64_t free_at_ = 0;  // mutex_
};

// The way to a listener of the plugin: as seen through it, the listener is at `host`.
class Relay {
 public:
  // Without `shared`, each socket has a limit of its own.
  Relay(const Handle& target, const std::string& host, const std::shared_ptr<Bucket>& shared) : handle_(target) {
    std::string bound;
    CHECK_OK(listen_tcp(host + ":0", &listener_, &bound));
    // A small window of TCP, so that a socket of the plugin soon has no room. Accepted sockets inherit it.
    const int little = 64 << 10;
    CHECK(::setsockopt(listener_.get(), SOL_SOCKET, SO_RCVBUF, &little, sizeof little) == 0);
    target_ = "127.0.0.1:" + std::to_string(target.port);
    std::string name;
    CHECK_OK(parse_address(bound, &name, &handle_.port));
    CHECK(::inet_pton(AF_INET, name.c_str(), handle_.address) == 1);
    for (auto& bucket : buckets_) bucket = shared != nullptr ? shared : std::make_shared<Bucket>(kEachRate);
    threads_.start([this] { accept(); });
  }
  ~Relay() {
    over_.store(true);
    threads_.join();  // the one that accepts joins the others
  }
  const Handle& handle() const { return handle_; }
  // Bytes that each data socket has carried.
  std::vector<uint64_t> bytes() const {
    std::vector<uint64_t> out;
    for (int i = 1; i <= settings().streams; ++i) out.push_back(bytes_[static_cast<size_t>(i)].load());
    return out;
  }

 private:
  void accept() {
    test::Threads threads;
    while (!over_.load()) {
      pollfd item{listener_.get(), POLLIN, 0};
      if (::poll(&item, 1, 20) <= 0) continue;
      auto near = std::make_shared<Fd>();
      auto far = std::make_shared<Fd>();
      std::string peer;
      CHECK_OK(accept_tcp(listener_.get(), near.get(), &peer));
      CHECK_OK(connect_tcp(target_, soon(), far.get()));
      threads.start([this, near, far] { pass(near->get(), far->get()); });
    }
  }

  // Passes on what comes from the sender, within the limit, and freely what the listener answers.
  void pass(int near, int far) {
    Hello hello;
    CHECK_OK(read_exact(near, &hello, sizeof hello, soon()));
    CHECK_OK(write_exact(far, &hello, sizeof hello, soon()));
    CHECK(hello.index < bytes_.size());
    char buffer[16 << 10];
    while (!over_.load()) {
      pollfd items[] = {{near, POLLIN, 0}, {far, POLLIN, 0}};
      if (::poll(items, 2, 20) <= 0) continue;
      if (items[1].revents != 0) {
        const ssize_t got = ::recv(far, buffer, sizeof buffer, 0);
        if (got <= 0 || !write_exact(near, buffer, static_cast<size_t>(got), soon())) return;
      }
      if (items[0].revents == 0) continue;
      const ssize_t got = ::recv(near, buffer, sizeof buffer, 0);
      if (got <= 0) return;
      buckets_[hello.index]->take(static_cast<size_t>(got));
      if (!write_exact(far, buffer, static_cast<size_t>(got), soon())) return;
      bytes_[hello.index] += static_cast<uint64_t>(got);
    }
  }

  Handle handle_;
  std::string target_;
  Fd listener_;
  std::array<std::shared_ptr<Bucket>, kMaxStreams + 1> buckets_;  // by the number of the socket
  std::array<std::atomic<uint64_t>, kMaxStreams + 1> bytes_ = {};
  std::atomic<bool> over_{false};
  test::Threads threads_;
};

// A connection through a relay, and the messages on it, each of which is compared.
class Traffic {
 public:
  Traffic(const std::string& host, const std::shared_ptr<Bucket>& shared) {
    Handle handle;
    CHECK_EQ(net().listen(nullptr, 0, &handle, &pair_.listener), kSuccess);
    relay_ = std::make_unique<Relay>(handle, host, shared);
    handle = relay_->handle();
    const int64_t deadline = soon();
    while (pair_.sender == nullptr || pair_.receiver == nullptr) {
      if (pair_.sender == nullptr) CHECK_EQ(net().connect(nullptr, 0, &handle, &pair_.sender, nullptr), kSuccess);
      if (pair_.receiver == nullptr) CHECK_EQ(net().accept(pair_.listener, &pair_.receiver, nullptr), kSuccess);
      CHECK(now_ns() < deadline);
      std::this_thread::yield();
    }
  }
  ~Traffic() { close(&pair_); }

  // Calls the plugin as NCCL does: the oldest message is asked for. `more`: may begin one.
  void turn(bool more) {
    if (more && begun_ < std::min(sent_, received_) + kWindow) begin();
    int done = 0;
    if (sent_ < begun_) {
      CHECK_EQ(net().test(sending_[sent_ % kWindow], &done, nullptr), kSuccess);
      sent_ += done != 0;
    }
    if (received_ == begun_) return;
    const size_t at = received_ % kWindow;
    int size = 0;
    CHECK_EQ(net().test(receiving_[at], &done, &size), kSuccess);
    if (done == 0) return;
    CHECK_EQ(static_cast<size_t>(size), kMessage);
    CHECK(std::memcmp(buffers_[at].data(), content(received_), kMessage) == 0);
    ++received_;
  }
  // The network is gone: the plugin says so of the message that it is asked for.
  void lose() {
    relay_.reset();
    const int64_t deadline = soon();
    int done = 0;
    while (net().test(sending_[sent_ % kWindow], &done, nullptr) == kSuccess) CHECK(now_ns() < deadline);
  }
  uint64_t begun() const { return begun_; }
  uint64_t received() const { return received_; }
  bool idle() const { return sent_ == begun_ && received_ == begun_; }
  // Bytes that each data socket has carried.
  std::vector<uint64_t> bytes() const { return relay_->bytes(); }

 private:
  // Messages differ in where they begin.
  const uint8_t* content(uint64_t message) const { return content_.data() + message * 997 % kShift; }
  void begin() {
    const size_t at = begun_ % kWindow;
    receiving_[at] = receive(pair_, buffers_[at].data(), kMessage);
    sending_[at] = send(pair_, content(begun_), kMessage);
    ++begun_;
  }

  static constexpr size_t kShift = 64 << 10;
  Pair pair_;
  std::unique_ptr<Relay> relay_;
  const std::vector<uint8_t> content_ = pattern(kMessage + kShift, 1);
  std::vector<std::vector<uint8_t>> buffers_{kWindow, std::vector<uint8_t>(kMessage)};
  void* sending_[kWindow] = {};
  void* receiving_[kWindow] = {};
  uint64_t begun_ = 0;
  uint64_t sent_ = 0;
  uint64_t received_ = 0;
};

// Connections to one host.
using Connections = std::vector<std::unique_ptr<Traffic>>;

Connections connect(size_t count, const std::string& host, const std::shared_ptr<Bucket>& shared) {
  Connections out;
  while (out.size() < count) out.push_back(std::make_unique<Traffic>(host, shared));
  return out;
}

// Keeps them busy until `enough` is true; false if that takes too long. Each begins some messages later than the one
// before it. No message is left on its way.
bool keep_busy(const Connections& connections, const std::function<bool()>& enough) {
  const int64_t until = now_ns() + kPatienceNs;
  bool found = false;
  bool idle = false;
  for (bool more = true; more || !idle;) {
    found = found || enough();
    more = more && !found && now_ns() < until;
    idle = true;
    uint64_t received = 0;
    for (size_t i = 0; i < connections.size(); ++i) {
      if (received >= i * kApart) connections[i]->turn(more);
      received += connections[i]->received();
      idle = idle && connections[i]->idle();
    }
    CHECK(now_ns() < until + kPatienceNs);
    std::this_thread::yield();
  }
  return found;
}

uint64_t sum(const std::vector<uint64_t>& bytes) {
  uint64_t out = 0;
  for (const uint64_t n : bytes) out += n;
  return out;
}

// How many sockets carried at least a tenth of it; where four share it fairly, each carries a quarter.
size_t count_busy(const std::vector<uint64_t>& bytes) {
  const uint64_t tenth = std::max<uint64_t>(1, sum(bytes) / 10);
  return static_cast<size_t>(std::count_if(bytes.begin(), bytes.end(), [=](uint64_t n) { return n >= tenth; }));
}

// How many carried anything at all.
size_t count_touched(const std::vector<uint64_t>& bytes) {
  return bytes.size() - static_cast<size_t>(std::count(bytes.begin(), bytes.end(), 0));
}

// Tells whether the sockets of one connection carried the right bytes of a slice.
using Check = std::function<bool(const std::vector<uint64_t>& carried)>;

// Whether the connections come to carry slice after slice as `right` says.
bool comes_to(const Connections& connections, const Check& right) {
  std::vector<std::vector<uint64_t>> before(connections.size());
  uint64_t looked_at = 0;
  int in_a_row = 0;
  return keep_busy(connections, [&] {
    std::vector<std::vector<uint64_t>> bytes;
    uint64_t total = 0;
    for (const auto& connection : connections) {
      bytes.push_back(connection->bytes());
      total += sum(bytes.back());
    }
    if (total - looked_at < kSlice * connections.size()) return false;
    bool all_right = true;
    for (size_t i = 0; i < bytes.size(); ++i) {
      before[i].resize(bytes[i].size());
      std::vector<uint64_t> carried;
      for (size_t k = 0; k < bytes[i].size(); ++k) carried.push_back(bytes[i][k] - before[i][k]);
      all_right = right(carried) && all_right;
    }
    before = std::move(bytes);
    looked_at = total;
    in_a_row = all_right ? in_a_row + 1 : 0;
    return in_a_row == kSlices;
  });
}

// Tries hosts until connections to one of them try all sockets and then stay with one each. The host, or "".
std::string host_with_one_each(const std::string& hosts, size_t count) {
  for (int i = 1; i <= kHosts; ++i) {
    bool tried = false;
    const std::string host = hosts + std::to_string(i);
    const auto right = [&](const std::vector<uint64_t>& carried) {
      const size_t touched = count_touched(carried);
      tried = tried || touched > 1;
      return tried && touched <= 1;
    };
    if (comes_to(connect(count, host, std::make_shared<Bucket>(kSharedRate * static_cast<double>(count))), right))
      return host;
  }
  return "";
}

// Bytes that each socket of a later connection carries of `messages` messages.
std::vector<uint64_t> carried_later(const std::string& host, const std::shared_ptr<Bucket>& shared, uint64_t messages) {
  const Connections later = connect(1, host, shared);
  CHECK(keep_busy(later, [&] { return later.front()->begun() == messages; }));
  return later.front()->bytes();
}

TEST(all_sockets_are_used_where_each_is_limited) {
  std::string host;
  bool spreads = false;
  for (int i = 1; !spreads && i <= kHosts; ++i) {
    host = "127.0.1." + std::to_string(i);
    spreads =
        comes_to(connect(1, host, nullptr), [](const auto& carried) { return count_busy(carried) == carried.size(); });
  }
  CHECK(spreads);
  // The host's trial counts for a connection that is made later, to another port: it spreads from the
  // beginning. A trial would have begun with 2 MB on one socket.
  const std::vector<uint64_t> bytes = carried_later(host, nullptr, 3);
  EXPECT(*std::max_element(bytes.begin(), bytes.end()) <= sum(bytes) / 2);
}

TEST(one_socket_is_used_where_all_share_a_limit) {
  const std::string host = host_with_one_each("127.0.2.", 1);
  CHECK(!host.empty());
  // Nor does a later connection try the others: a trial would have done that after 10 MB.
  const auto shared = std::make_shared<Bucket>(kSharedRate);
  EXPECT_EQ(count_touched(carried_later(host, shared, kSlices * kSlice / kMessage)), 1u);
}

// One that tries all of its sockets while the others have one each takes from them, and is faster by that.
TEST(connections_that_share_a_limit_do_not_mislead_each_other) {
  CHECK(!host_with_one_each("127.0.3.", 3).empty());
}

// Else its host would take each moment in which the others have nothing to send for a slow one.
TEST(a_connection_that_failed_waits_no_more) {
  const std::string host = "127.0.4.1";
  Traffic lost(host, nullptr);
  while (lost.begun() < kWindow) lost.turn(true);
  lost.lose();
  SendHost* const peer = SendHost::of(host + ":1");
  const int64_t start = now_ns();
  for (int64_t second = 1; second < 20; ++second) {
    peer->sent(StreamCount::kOneBytes);
    peer->tell(start + second * kNsPerS, 0);
    EXPECT(!peer->spreads());  // nothing was tried: nobody waited
  }
}

}  // namespace
}  // namespace bagua::nccl_net::rig
