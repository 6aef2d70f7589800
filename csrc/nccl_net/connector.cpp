#include "nccl_net/connector.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>

#include "base/clock.h"
#include "base/random.h"
#include "base/scarcity.h"
#include "base/text.h"
#include "nccl_net/settings.h"
#include "net/pacing.h"

namespace bagua::nccl_net {
namespace {

constexpr int64_t kFirstPauseNs = 5 * kNsPerMs;
constexpr int64_t kLongestPauseNs = 500 * kNsPerMs;

bool ready(int fd, short events) {
  pollfd item{fd, events, 0};
  return ::poll(&item, 1, 0) > 0;
}

}  // namespace

Status handle_address(const Handle& handle, const Device& device, Address* out) {
  if (handle.magic != Handle::kMagic) {
    return {Code::kInvalid, "the handle is not from this plugin: all ranks must use the same network plugin"};
  }
  if (handle.version != kProtocolVersion) {
    return {Code::kInvalid, "the handle is of version " + std::to_string(handle.version) +
                                " of the protocol, this process speaks version " + std::to_string(kProtocolVersion) +
                                ": use the same bagua on all hosts"};
  }
  if ((handle.family != 4 && handle.family != 6) || handle.port == 0) {
    return {Code::kInvalid, "the handle is damaged"};
  }
  *out = {};
  std::memset(static_cast<void*>(out), 0, sizeof *out);
  if (handle.family == 4) {
    out->v4.sin_family = AF_INET;
    std::memcpy(&out->v4.sin_addr, handle.address, sizeof out->v4.sin_addr);
    out->v4.sin_port = htons(handle.port);
    return Status::ok();
  }
  out->v6.sin6_family = AF_INET6;
  std::memcpy(&out->v6.sin6_addr, handle.address, sizeof out->v6.sin6_addr);
  out->v6.sin6_port = htons(handle.port);
  if (handle.link_local != 0) {
    if (device.address.any.sa_family != AF_INET6 || device.address.v6.sin6_scope_id == 0) {
      return {Code::kInvalid,
              "the peer has a link-local IPv6 address, but interface " + device.name +
                  " has none here: set NCCL_SOCKET_FAMILY and NCCL_SOCKET_IFNAME to the same on all hosts"};
    }
    out->v6.sin6_scope_id = device.address.v6.sin6_scope_id;
  }
  return Status::ok();
}

Connector::Connector(const Handle& handle, const Address& address)
    : handle_(handle), address_(address), pause_ns_(kFirstPauseNs) {}

Status Connector::step(std::unique_ptr<SendConnection>* out) {
  stepped_ns_ = now_ns();
  if (stepped_ns_ < next_try_ns_) return Status::ok();
  if (sockets_.empty()) {
    if (const int error = begin(); error != 0) return retry(error);
  }
  bool greeted = true;
  for (size_t i = 0; i < sockets_.size(); ++i) {
    if (const int error = advance(i); error != 0) return retry(error);
    greeted = greeted && sockets_[i].stage == Stage::kGreeted;
  }
  if (!greeted) {
    // The kernel would give up by itself, but too late.
    const int64_t limit = settings().connect_timeout_s * kNsPerS;
    return stepped_ns_ - attempt_ns_ < limit ? Status::ok() : retry(ETIMEDOUT);
  }
  bool answered = false;
  Status answer;
  if (const int error = read_answer(&answered, &answer); error != 0) return retry(error);
  if (!answer) return answer;  // refused
  if (!answered) return Status::ok();
  std::vector<Fd> sockets;
  for (Pending& pending : sockets_) {
    pace_if_far(pending.socket.get());
    sockets.push_back(std::move(pending.socket));
  }
  Status status;
  *out = SendConnection::open(std::move(sockets), address_text(address_), &status);
  return status;
}

int Connector::begin() {
  if (!fill_random(&connection_, sizeof connection_)) return EIO;
  answer_got_ = 0;
  attempt_ns_ = stepped_ns_;
  sockets_.resize(static_cast<size_t>(settings().streams) + 1);
  for (Pending& pending : sockets_) {
    const int family = address_.any.sa_family;
    pending.socket = Fd(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!pending.socket.valid()) return errno;
    // Data sockets keep few unsent bytes, so that the next chunk goes to a socket with room. The control socket may
    // keep many: its messages stay in order anyway, and TCP joins them into few large packets.
    set_tcp_options(pending.socket.get(), &pending != &sockets_.front());
    begin_without_pacing(pending.socket.get());
    pending.stage = Stage::kConnecting;
    if (::connect(pending.socket.get(), &address_.any, address_bytes(address_)) == 0) {
      pending.stage = Stage::kGreeting;
    } else if (errno != EINPROGRESS) {
      return errno;
    }
  }
  return 0;
}

int Connector::advance(size_t index) {
  Pending& pending = sockets_[index];
  if (pending.stage == Stage::kConnecting) {
    if (!ready(pending.socket.get(), POLLOUT)) return 0;
    int error = 0;
    socklen_t length = sizeof error;
    if (::getsockopt(pending.socket.get(), SOL_SOCKET, SO_ERROR, &error, &length) != 0) return errno;
    if (error != 0) return error;
    pending.stage = Stage::kGreeting;
  }
  return pending.stage == Stage::kGreeting ? greet(index) : 0;
}

int Connector::greet(size_t index) {
  Pending& pending = sockets_[index];
  Hello hello{};
  hello.magic = Hello::kMagic;
  hello.version = kProtocolVersion;
  hello.streams = static_cast<uint16_t>(sockets_.size() - 1);
  hello.nonce = handle_.nonce;
  hello.connection = connection_;
  hello.index = static_cast<uint16_t>(index);
  const char* at = reinterpret_cast<const char*>(&hello) + pending.sent;
  const ssize_t put = ::send(pending.socket.get(), at, sizeof hello - pending.sent, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (put < 0) return errno == EAGAIN || errno == EINTR ? 0 : errno;
  pending.sent += static_cast<size_t>(put);
  if (pending.sent == sizeof hello) pending.stage = Stage::kGreeted;
  return 0;
}

int Connector::read_answer(bool* answered, Status* answer) {
  char* at = reinterpret_cast<char*>(&answer_) + answer_got_;
  const ssize_t got = ::recv(sockets_[0].socket.get(), at, sizeof answer_ - answer_got_, MSG_DONTWAIT);
  if (got < 0) return errno == EAGAIN || errno == EINTR ? 0 : errno;
  if (got == 0) return ECONNRESET;
  answer_got_ += static_cast<size_t>(got);
  if (answer_got_ < sizeof answer_) return 0;
  if (answer_.magic != Answer::kMagic) {
    *answer = {Code::kCorrupt, address_text(address_) + " is no listener of this plugin"};
  } else if (answer_.accepted != 1) {
    *answer = {Code::kUnavailable, address_text(address_) + " speaks version " + std::to_string(answer_.version) +
                                       " of the protocol, this process version " + std::to_string(kProtocolVersion) +
                                       ": use the same bagua on all hosts"};
  }
  *answered = true;
  return 0;
}

// Starts again after a pause, if `error` can go away and there is time left.
Status Connector::retry(int error) {
  sockets_.clear();
  const int64_t limit = settings().connect_timeout_s * kNsPerS;
  if (failing_since_ns_ < 0) failing_since_ns_ = attempt_ns_;
  const int64_t tried = stepped_ns_ - failing_since_ns_;
  if (!worth_retrying(error) || tried >= limit) {
    const bool scarce = is_scarcity(error);
    const Code code = worth_retrying(error) && !scarce ? Code::kUnavailable : Code::kResource;
    return {code, "can't connect to " + address_text(address_) + " (tried for " + duration_text(tried) +
                      "): " + (scarce ? scarcity_text(error) : errno_text(error))};
  }
  next_try_ns_ = stepped_ns_ + pause_ns_;
  pause_ns_ = std::min(pause_ns_ * 2, kLongestPauseNs);
  return Status::ok();
}

}  // namespace bagua::nccl_net
