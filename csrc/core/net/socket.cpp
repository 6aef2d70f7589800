#include "net/socket.h"

#include <arpa/inet.h>
#include <linux/tcp.h>  // tcp_info with the shortest round trip, which glibc's lacks
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>

#include "base/clock.h"
#include "base/scarcity.h"
#include "base/text.h"
#include "net/pacing.h"

namespace bagua {
namespace {

struct FreeAddresses {
  void operator()(addrinfo* list) const { ::freeaddrinfo(list); }
};
using Addresses = std::unique_ptr<addrinfo, FreeAddresses>;

Status resolve(const std::string& address, int flags, Addresses* out) {
  std::string host;
  uint16_t port = 0;
  if (Status status = parse_address(address, &host, &port); !status) return status;
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | flags;
  addrinfo* list = nullptr;
  const int error = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list);
  if (error != 0) {
    const Code code = flags == 0 ? Code::kUnavailable : Code::kInvalid;  // a name of another host may come back
    return {code, "can't resolve the host name '" + host + "' of address '" + address +
                      "': " + (error == EAI_SYSTEM ? errno_text(errno) : ::gai_strerror(error))};
  }
  out->reset(list);
  return Status::ok();
}

// On loopback the kernel can choose the dialled port as the local port: then the socket is connected to itself.
bool connected_to_itself(int fd) {
  sockaddr_storage here{};
  sockaddr_storage there{};
  socklen_t here_length = sizeof here;
  socklen_t there_length = sizeof there;
  return ::getsockname(fd, reinterpret_cast<sockaddr*>(&here), &here_length) == 0 &&
         ::getpeername(fd, reinterpret_cast<sockaddr*>(&there), &there_length) == 0 && here_length == there_length &&
         std::memcmp(&here, &there, here_length) == 0;
}

bool is_loopback(const sockaddr_storage& address) {
  if (address.ss_family == AF_UNIX) return true;
  if (address.ss_family == AF_INET) {
    return ntohl(reinterpret_cast<const sockaddr_in&>(address).sin_addr.s_addr) >> 24 == 127;
  }
  if (address.ss_family != AF_INET6) return false;
  const in6_addr& v6 = reinterpret_cast<const sockaddr_in6&>(address).sin6_addr;
  return IN6_IS_ADDR_LOOPBACK(&v6) || (IN6_IS_ADDR_V4MAPPED(&v6) && v6.s6_addr[12] == 127);
}

// One attempt; returns an errno value (0: connected).
int connect_once(const addrinfo& target, int64_t deadline_ns, int stop_fd, Fd* out) {
  Fd socket(::socket(target.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket.valid()) return errno;
  begin_without_pacing(socket.get());
  if (::connect(socket.get(), target.ai_addr, target.ai_addrlen) != 0) {
    if (errno != EINPROGRESS) return errno;
    const Code waited = wait_ready(socket.get(), POLLOUT, deadline_ns, stop_fd).code();
    if (waited != Code::kOk) return waited == Code::kTimeout ? ETIMEDOUT : waited == Code::kAborted ? ECANCELED : EIO;
    int error = 0;
    socklen_t length = sizeof error;
    if (::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &length) != 0) return errno;
    if (error != 0) return error;
  }
  if (connected_to_itself(socket.get())) return ECONNREFUSED;
  set_tcp_options(socket.get());
  pace_if_far(socket.get());
  *out = std::move(socket);
  return 0;
}

Status connect_failed(const std::string& address, int error, int64_t tried_ns) {
  const std::string tried = " (tried for " + duration_text(tried_ns) + ")";
  if (error == ECONNREFUSED) return {Code::kUnavailable, "nobody listens at " + address + tried};
  if (error == ETIMEDOUT) return {Code::kTimeout, "no answer from " + address + tried};
  if (is_scarcity(error)) return {Code::kResource, "can't connect to " + address + tried + ": " + scarcity_text(error)};
  const Code code = worth_retrying(error) ? Code::kUnavailable : Code::kInternal;
  return {code, "can't connect to " + address + tried + ": " + errno_text(error)};
}

}  // namespace

std::string address_text(const sockaddr* address, socklen_t length) {
  char host[NI_MAXHOST];
  char port[NI_MAXSERV];
  if (::getnameinfo(address, length, host, sizeof host, port, sizeof port, NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    return "an unknown address";
  }
  const bool v6 = address->sa_family == AF_INET6;
  return (v6 ? "[" : "") + std::string(host) + (v6 ? "]:" : ":") + port;
}

Status parse_address(const std::string& address, std::string* host, uint16_t* port) {
  const Status bad(Code::kInvalid, "'" + address + "' is not an address: write host:port or [v6]:port");
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos || colon == 0) return bad;
  std::string name = address.substr(0, colon);
  if (name.front() == '[') {
    if (name.size() < 3 || name.back() != ']') return bad;
    name = name.substr(1, name.size() - 2);
  } else if (name.find(':') != std::string::npos) {
    return bad;  // an IPv6 address without brackets: the beginning of the port is ambiguous
  }
  if (name.find('\0') != std::string::npos) return bad;
  unsigned value = 0;
  const char* end = address.data() + address.size();
  const auto [stop, error] = std::from_chars(address.data() + colon + 1, end, value);
  if (error != std::errc() || stop != end || value > 65535) return bad;
  *host = std::move(name);
  *port = static_cast<uint16_t>(value);
  return Status::ok();
}

Status listen_tcp(const std::string& address, Fd* out, std::string* bound) {
  if (Status status = check_congestion_setting(); !status) return status;
  Addresses addresses;
  if (Status status = resolve(address, AI_PASSIVE, &addresses); !status) return status;
  const addrinfo& target = *addresses;
  Fd socket(::socket(target.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket.valid()) return {Code::kResource, "can't create a socket: " + errno_text(errno)};
  const int on = 1;
  ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  begin_without_pacing(socket.get());
  if (::bind(socket.get(), target.ai_addr, target.ai_addrlen) != 0 || ::listen(socket.get(), 512) != 0) {
    const int error = errno;
    std::string host;
    uint16_t port = 0;
    static_cast<void>(parse_address(address, &host, &port));
    if (error == EADDRINUSE) {
      return {Code::kInvalid, "port " + std::to_string(port) + " on " + host +
                                  " is in use: stop the program that has it, or choose another port"};
    }
    if (error == EADDRNOTAVAIL) {
      return {Code::kInvalid, "can't listen on " + address + ": this machine has no address " + host};
    }
    if (error == EACCES) {
      return {Code::kInvalid, "can't listen on " + address + ": not allowed; choose a port above 1023"};
    }
    return {Code::kInvalid, "can't listen on " + address + ": " + errno_text(error)};
  }
  sockaddr_storage here{};
  socklen_t length = sizeof here;
  if (::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&here), &length) != 0) {
    return {Code::kInternal, "getsockname: " + errno_text(errno)};
  }
  *bound = address_text(reinterpret_cast<sockaddr*>(&here), length);
  *out = std::move(socket);
  return Status::ok();
}

Status connect_tcp(const std::string& address, int64_t deadline_ns, Fd* out, int stop_fd) {
  const int64_t start = now_ns();
  int64_t pause = 5 * kNsPerMs;
  Addresses addresses;
  if (Status status = resolve(address, 0, &addresses); !status) return status;
  for (;;) {
    int error = 0;
    for (const addrinfo* target = addresses.get(); target != nullptr; target = target->ai_next) {
      error = connect_once(*target, deadline_ns, stop_fd, out);
      if (error == 0) return Status::ok();
      if (error == ECANCELED) return {Code::kAborted, "nobody needs the connection to " + address + " any more"};
    }
    const int64_t now = now_ns();
    if (!worth_retrying(error) || (deadline_ns >= 0 && now >= deadline_ns)) {
      return connect_failed(address, error, now - start);
    }
    // No event tells that a port has been opened: try again at growing intervals.
    const int64_t until = deadline_ns < 0 ? now + pause : std::min(deadline_ns, now + pause);
    pollfd stop{stop_fd, POLLIN, 0};
    ::poll(&stop, 1, timeout_ms(until));
    pause = std::min(pause * 2, 200 * kNsPerMs);
  }
}

Status accept_tcp(int listener, Fd* out, std::string* peer) {
  sockaddr_storage from{};
  socklen_t length = sizeof from;
  const int fd = ::accept4(listener, reinterpret_cast<sockaddr*>(&from), &length, SOCK_NONBLOCK | SOCK_CLOEXEC);
  if (fd < 0) {
    if (is_scarcity(errno)) return {Code::kResource, scarcity_text(errno)};
    return {Code::kUnavailable, "no connection to accept: " + errno_text(errno)};
  }
  *out = Fd(fd);
  set_tcp_options(fd);
  pace_if_far(fd);
  *peer = address_text(reinterpret_cast<sockaddr*>(&from), length);
  return Status::ok();
}

bool listens_on_host(int listener) {
  sockaddr_storage here{};
  socklen_t length = sizeof here;
  return ::getsockname(listener, reinterpret_cast<sockaddr*>(&here), &length) == 0 && is_loopback(here);
}

bool stays_on_host(int fd) {
  sockaddr_storage there{};
  socklen_t length = sizeof there;
  return listens_on_host(fd) && ::getpeername(fd, reinterpret_cast<sockaddr*>(&there), &length) == 0 &&
         is_loopback(there);
}

Status wait_ready(int fd, short events, int64_t deadline_ns, int stop_fd) {
  for (;;) {
    pollfd items[] = {{fd, events, 0}, {stop_fd, POLLIN, 0}};
    const int ready = ::poll(items, 2, timeout_ms(deadline_ns));
    if (ready > 0) return items[1].revents == 0 ? Status::ok() : Status(Code::kAborted, "");
    if (ready == 0) {
      if (deadline_ns >= 0 && now_ns() >= deadline_ns) return {Code::kTimeout, ""};
    } else if (errno != EINTR) {
      return {Code::kInternal, "poll: " + errno_text(errno)};
    }
  }
}

namespace {

Status move_exact(int fd, char* at, size_t n, bool reads, int64_t deadline_ns) {
  const size_t wanted = n;
  while (n > 0) {
    const ssize_t moved = reads ? ::recv(fd, at, n, 0) : ::send(fd, at, n, MSG_NOSIGNAL);
    if (moved > 0) {
      at += moved;
      n -= static_cast<size_t>(moved);
      continue;
    }
    const std::string progress = std::to_string(wanted - n) + " of " + std::to_string(wanted) + " bytes";
    if (moved == 0) return {Code::kUnavailable, "the other side closed the connection after " + progress};
    if (errno == EINTR) continue;
    if (errno != EAGAIN) {
      return {Code::kUnavailable, "the connection broke after " + progress + ": " + errno_text(errno)};
    }
    const Status ready = wait_ready(fd, reads ? POLLIN : POLLOUT, deadline_ns);
    if (ready.code() == Code::kTimeout) {
      return {Code::kTimeout,
              (reads ? "only " : "the other side took only ") + progress + (reads ? " came in time" : " in time")};
    }
    if (!ready) return ready;
  }
  return Status::ok();
}

}  // namespace

Status read_exact(int fd, void* data, size_t n, int64_t deadline_ns) {
  return move_exact(fd, static_cast<char*>(data), n, true, deadline_ns);
}

Status write_exact(int fd, const void* data, size_t n, int64_t deadline_ns) {
  return move_exact(fd, const_cast<char*>(static_cast<const char*>(data)), n, false, deadline_ns);
}

ssize_t send_parts(int fd, const iovec* parts, size_t count) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(parts);  // msghdr has no const
  message.msg_iovlen = count;
  ssize_t put;
  do {
    put = ::sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (put < 0 && errno == EINTR);
  return put;
}

ssize_t receive_parts(int fd, iovec* parts, size_t count) {
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = count;
  ssize_t got;
  do {  // recv() is cheaper, where it suffices
    got =
        count == 1 ? ::recv(fd, parts->iov_base, parts->iov_len, MSG_DONTWAIT) : ::recvmsg(fd, &message, MSG_DONTWAIT);
  } while (got < 0 && errno == EINTR);
  return got;
}

void set_tcp_options(int fd, bool few_unsent) {
  const struct {
    int level, name, value;
  } options[] = {{IPPROTO_TCP, TCP_NODELAY, 1},   {SOL_SOCKET, SO_KEEPALIVE, 1},
                 {IPPROTO_TCP, TCP_KEEPIDLE, 10}, {IPPROTO_TCP, TCP_KEEPINTVL, 3},
                 {IPPROTO_TCP, TCP_KEEPCNT, 4},   {IPPROTO_TCP, TCP_NOTSENT_LOWAT, 256 << 10}};
  for (const auto& option : options) {
    if (option.name == TCP_NOTSENT_LOWAT && !few_unsent) continue;
    ::setsockopt(fd, option.level, option.name, &option.value, sizeof option.value);
  }
}

bool worth_retrying(int error) {
  return error != EBADF && error != EFAULT && error != ENOTSOCK && error != EPROTOTYPE && error != EISCONN;
}

int64_t unacknowledged_ns(int fd) {
  tcp_info info{};
  socklen_t length = sizeof info;
  if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return 0;
  return info.tcpi_unacked == 0 || info.tcpi_retransmits == 0 ? 0 : int64_t{info.tcpi_last_ack_recv} * kNsPerMs;
}

int64_t shortest_round_trip_ns(int fd) {
  tcp_info info{};
  socklen_t length = sizeof info;
  // Before a measurement all bits are set.
  if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) != 0 || info.tcpi_min_rtt == UINT32_MAX) return -1;
  return int64_t{info.tcpi_min_rtt} * 1000;
}

}  // namespace bagua
