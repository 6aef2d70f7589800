// Addresses, listening, connecting, exact reads and writes: results, deadlines and words.
#include "net/socket.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <thread>

#include "base/clock.h"
#include "harness.h"
#include "net/crowd.h"
#include "net/pacing.h"

namespace bagua {
namespace {

using test::has;

int64_t in_ms(int64_t ms) {
  return now_ns() + ms * kNsPerMs;
}

// A listener on loopback, and a port on which nobody listens.
struct Listener {
  Fd socket;
  std::string address;
  explicit Listener(const std::string& at = "127.0.0.1:0") { CHECK_OK(listen_tcp(at, &socket, &address)); }
};

std::string unused_address() {
  return Listener().address;
}

struct Pair {
  Fd a;
  Fd b;
  Pair() {
    int ends[2];
    CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0);
    a = Fd(ends[0]);
    b = Fd(ends[1]);
  }
};

TEST(whoever_comes_alone_is_not_crowded_out) {
  struct Stranger {
    std::string peer;
  };
  EXPECT_EQ(crowding(std::vector<Stranger>{{"10.0.0.1:1"}}), size_t{0});
  EXPECT_EQ(crowding(std::vector<Stranger>{{"10.0.0.1:1"}, {"[::1]:7"}, {"[::1]:8"}, {"10.0.0.2:1"}}), size_t{1});
}

TEST(addresses) {
  std::string host;
  uint16_t port = 0;
  CHECK_OK(parse_address("127.0.0.1:7670", &host, &port));
  EXPECT_EQ(host, "127.0.0.1");
  EXPECT_EQ(port, 7670);
  CHECK_OK(parse_address("[::1]:65535", &host, &port));
  EXPECT_EQ(host, "::1");
  EXPECT_EQ(port, 65535);
  CHECK_OK(parse_address("node-1.example:0", &host, &port));
  EXPECT_EQ(host, "node-1.example");
  for (const char* bad : {"", ":", ":1", "host", "host:", "host:x", "host:65536", "host:-1", "host:1x", "::1:5",
                          "[::1]", "[]:1", "[::1:5", "host:99999999999999999999"}) {
    const Status status = parse_address(bad, &host, &port);
    EXPECT(status.code() == Code::kInvalid);
    has(status, std::string("'") + bad + "'");
  }
}

TEST(listen_and_connect) {
  Listener listener;
  EXPECT(listener.address.rfind("127.0.0.1:", 0) == 0);
  EXPECT(listener.address != "127.0.0.1:0");
  Fd out;
  CHECK_OK(connect_tcp(listener.address, in_ms(5000), &out));
  Fd in;
  std::string peer;
  CHECK_OK(accept_tcp(listener.socket.get(), &in, &peer));
  EXPECT(peer.rfind("127.0.0.1:", 0) == 0);
  for (const int fd : {out.get(), in.get(), listener.socket.get()}) {
    EXPECT((::fcntl(fd, F_GETFL) & O_NONBLOCK) != 0);
    EXPECT((::fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0);
  }
  CHECK_OK(write_exact(out.get(), "hello", 5, in_ms(1000)));
  char text[5];
  CHECK_OK(read_exact(in.get(), text, 5, in_ms(1000)));
  EXPECT_EQ(std::string(text, 5), "hello");
  const Status none = accept_tcp(listener.socket.get(), &in, &peer);
  EXPECT(none.code() == Code::kUnavailable);
}

TEST(port_in_use) {
  Listener listener;
  Fd second;
  std::string bound;
  const Status status = listen_tcp(listener.address, &second, &bound);
  EXPECT(status.code() == Code::kInvalid);
  has(status, "is in use");
  has(status, "port " + listener.address.substr(listener.address.find(':') + 1) + " on 127.0.0.1");
}

TEST(refused_until_the_deadline) {
  const std::string address = unused_address();
  Fd out;
  const int64_t start = now_ns();
  const Status status = connect_tcp(address, in_ms(300), &out);
  const int64_t took = now_ns() - start;
  EXPECT(status.code() == Code::kUnavailable);
  has(status, "nobody listens at " + address + " (tried for 0.3 s)");
  EXPECT(took >= 290 * kNsPerMs);
  EXPECT(took < 5 * kNsPerS);
}

// Whatever the network or a firewall answers: a host that can't be reached is a loss, which a job may survive.
TEST(any_refusal_by_the_network_may_pass) {
  for (const int error : {EACCES, EPERM, EINVAL, ENETDOWN, ENETUNREACH, EHOSTUNREACH, EADDRNOTAVAIL, ENOPROTOOPT}) {
    EXPECT(worth_retrying(error));
  }
  EXPECT(!worth_retrying(EBADF));
  Fd out;
  for (const std::string address : {"[fe80::1]:9", "no-such-host.invalid:9"}) {  // EINVAL: it lacks the link
    const Status status = connect_tcp(address, in_ms(300), &out);
    EXPECT(status.code() == Code::kUnavailable || status.code() == Code::kTimeout);
  }
}

TEST(connects_when_the_listener_comes) {
  std::string address = unused_address();
  Fd listener;
  test::Threads threads;
  threads.start([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    std::string bound;
    CHECK_OK(listen_tcp(address, &listener, &bound));
  });
  Fd out;
  EXPECT_OK(connect_tcp(address, in_ms(10'000), &out));
  threads.join();
}

TEST(reads_have_deadlines) {
  Pair pair;
  char text[10];
  CHECK_OK(write_exact(pair.a.get(), "abc", 3, in_ms(1000)));
  const Status late = read_exact(pair.b.get(), text, 10, in_ms(50));
  EXPECT(late.code() == Code::kTimeout);
  has(late, "3 of 10 bytes");
  CHECK_OK(write_exact(pair.a.get(), "abc", 3, in_ms(1000)));
  pair.a.reset();
  const Status closed = read_exact(pair.b.get(), text, 10, in_ms(1000));
  EXPECT(closed.code() == Code::kUnavailable);
  has(closed, "closed the connection after 3 of 10 bytes");
  const Status gone = write_exact(pair.b.get(), text, 10, in_ms(1000));  // and no SIGPIPE
  EXPECT(gone.code() == Code::kUnavailable);
}

TEST(writes_have_deadlines) {
  Pair pair;
  const std::string much(16 << 20, 'x');
  const Status status = write_exact(pair.a.get(), much.data(), much.size(), in_ms(50));
  EXPECT(status.code() == Code::kTimeout);
  has(status, "of 16777216 bytes in time");
}

// 127.0.0.0/8 and ::1 at both ends, also as IPv6 writes them; sockets of the file system. Everything else leaves the
// host, as far as anybody can tell.
TEST(connections_that_stay_on_the_host) {
  for (const char* address : {"127.0.0.1:0", "127.8.9.10:0", "[::1]:0"}) {
    Fd listener, near, far;
    std::string bound, peer;
    if (!listen_tcp(address, &listener, &bound) && address[0] == '[') continue;  // no IPv6 here
    EXPECT(listens_on_host(listener.get()));
    CHECK_OK(connect_tcp(bound, in_ms(5000), &near));
    CHECK_OK(accept_tcp(listener.get(), &far, &peer));
    EXPECT(stays_on_host(near.get()) && stays_on_host(far.get()));
  }
  int ends[2];
  CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
  const Fd one(ends[0]), other(ends[1]);
  EXPECT(stays_on_host(one.get()) && stays_on_host(other.get()));
  Fd open_to_all;
  std::string bound;
  CHECK_OK(listen_tcp("0.0.0.0:0", &open_to_all, &bound));
  EXPECT(!listens_on_host(open_to_all.get()));
  EXPECT(!stays_on_host(open_to_all.get()));  // it is connected to nobody
}

// ---- pacing

std::string congestion(const Fd& socket) {
  char name[17] = {};
  socklen_t length = sizeof name - 1;
  CHECK(::getsockopt(socket.get(), IPPROTO_TCP, TCP_CONGESTION, name, &length) == 0);
  return name;
}

// Nearby nothing paces; far connections, and all with BAGUA_TCP_CONGESTION=system, have what the system chose.
TEST(congestion_control) {
  const std::string system = congestion(Fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)));
  for (const char* setting : {"auto", "system"}) {
    ::setenv("BAGUA_TCP_CONGESTION", setting, 1);
    Fd ends[2];
    Listener listener;
    std::string peer;
    CHECK_OK(connect_tcp(listener.address, in_ms(5000), &ends[0]));
    CHECK_OK(accept_tcp(listener.socket.get(), &ends[1], &peer));
    ::unsetenv("BAGUA_TCP_CONGESTION");
    for (const Fd& end : ends) {
      const std::string near = congestion(end);
      const bool paced = system.rfind("bbr", 0) == 0 && setting == std::string("auto");
      EXPECT(paced ? near == "cubic" || near == "reno" : near == system);
      pace_if_far(end.get(), 0);
      EXPECT_EQ(congestion(end), system);
    }
  }
}

TEST(congestion_setting_that_is_none) {
  ::setenv("BAGUA_TCP_CONGESTION", "fast", 1);
  Fd socket;
  std::string bound;
  const Status status = listen_tcp("127.0.0.1:0", &socket, &bound);
  ::unsetenv("BAGUA_TCP_CONGESTION");
  EXPECT(status.code() == Code::kInvalid);
  has(status, "BAGUA_TCP_CONGESTION is 'fast'");
}

}  // namespace
}  // namespace bagua
