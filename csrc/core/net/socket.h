// TCP sockets: an owning descriptor, addresses, and functions that connect, listen and accept. Each call that blocks
// has a deadline.
#pragma once

#include <cstdint>
#include <string>

#include "base/status.h"

namespace bagua {

// Move-only owner of a file descriptor.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}
  Socket(Socket&& other) noexcept : fd_(other.release()) {}
  Socket& operator=(Socket&& other) noexcept;
  ~Socket() { reset(); }
  int fd() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  int release();
  void reset();

 private:
  int fd_ = -1;
};

// "host:port" with a numeric IPv4 address, "[v6]:port", or a name that getaddrinfo resolves.
Status parse_address(const std::string& address, std::string* host, uint16_t* port);
// Listens (SO_REUSEADDR, non-blocking); `bound` gets the numeric "host:port" with the real port.
Status listen_tcp(const std::string& address, Socket* out, std::string* bound);
// Connects before a deadline (CLOCK_MONOTONIC ns); retries while the peer refuses. TCP_NODELAY, non-blocking. kAborted:
// `stop_fd` is readable (-1: there is none).
Status connect_tcp(const std::string& address, int64_t deadline_ns, Socket* out, int stop_fd = -1);
// Accepts a connection: TCP_NODELAY, non-blocking, close-on-exec.
Status accept_tcp(int listener, Socket* out, std::string* peer);
// True if no byte of the connection can leave this host: both addresses are loopback addresses (127.0.0.0/8, ::1), or
// it is no network connection.
bool stays_on_host(int fd);
// The same for all connections that this listener accepts.
bool listens_on_host(int listener);
// Read or write exactly n bytes on a non-blocking socket before the deadline.
Status read_exact(int fd, void* data, size_t n, int64_t deadline_ns);
Status write_exact(int fd, const void* data, size_t n, int64_t deadline_ns);

}  // namespace bagua
