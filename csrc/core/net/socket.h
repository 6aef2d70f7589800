// TCP sockets: functions that connect, listen and accept, addresses, and what the kernel knows about a connection. Each
// call that blocks has a deadline.
#pragma once

#include <sys/socket.h>
#include <sys/uio.h>

#include <cstdint>
#include <string>

#include "base/fd.h"
#include "base/status.h"

namespace bagua {

// "10.0.0.1:4711", "[fe80::1%eth0]:4711".
std::string address_text(const sockaddr* address, socklen_t length);
// "host:port" with a numeric IPv4 address, "[v6]:port", or a name that getaddrinfo resolves.
Status parse_address(const std::string& address, std::string* host, uint16_t* port);
// Listens (SO_REUSEADDR, non-blocking); `bound` gets the numeric "host:port" with the real port.
Status listen_tcp(const std::string& address, Fd* out, std::string* bound);
// Connects before a deadline (CLOCK_MONOTONIC ns); retries while the peer refuses. TCP_NODELAY, non-blocking. kAborted:
// `stop_fd` is readable (-1: there is none).
Status connect_tcp(const std::string& address, int64_t deadline_ns, Fd* out, int stop_fd = -1);
// Accepts a connection: TCP_NODELAY, non-blocking, close-on-exec.
Status accept_tcp(int listener, Fd* out, std::string* peer);
// True if no byte of the connection can leave this host: both addresses are loopback addresses (127.0.0.0/8, ::1), or
// it is no network connection.
bool stays_on_host(int fd);
// The same for all connections that this listener accepts.
bool listens_on_host(int listener);
// Waits until `fd` is ready for `events` of poll(2). Without text: kTimeout at the deadline, kAborted if `stop_fd` is
// readable (-1: there is none).
Status wait_ready(int fd, short events, int64_t deadline_ns, int stop_fd = -1);
// Read or write exactly n bytes on a non-blocking socket before the deadline.
Status read_exact(int fd, void* data, size_t n, int64_t deadline_ns);
Status write_exact(int fd, const void* data, size_t n, int64_t deadline_ns);
// sendmsg() and recvmsg() that do not wait, and begin again after a signal. They return -1 with errno; receive_parts()
// 0 at the end.
ssize_t send_parts(int fd, const iovec* parts, size_t count);
ssize_t receive_parts(int fd, iovec* parts, size_t count);

// Sets the options of a connection, as connect_tcp() and accept_tcp() do. Small frames leave at once (TCP_NODELAY).
// Keep-alive probes find a vanished host on an idle connection after about 20 s. `few_unsent`: at most 256 KiB wait in
// the kernel unsent, apart from bytes in flight: the caller keeps the rest and can still give it to the stream that
// drains first. The kernel chooses buffer sizes.
void set_tcp_options(int fd, bool few_unsent = true);
// True if an attempt to connect that failed with this errno value may succeed later: all that networks, firewalls and
// hosts answer. A mistake of the program's own stays one.
bool worth_retrying(int error);
// For how long nothing has been acknowledged although bytes are sent again and again (a cut cable, a machine that is
// down); 0: the connection is well. A receiver without room still acknowledges.
int64_t unacknowledged_ns(int fd);
// Shortest round trip that TCP has seen on a connection; -1: unknown.
int64_t shortest_round_trip_ns(int fd);

}  // namespace bagua
