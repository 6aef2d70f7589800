#include "nccl_net/listener.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

#include "base/clock.h"
#include "base/random.h"
#include "base/text.h"
#include "nccl_net/log.h"
#include "nccl_net/settings.h"
#include "net/crowd.h"

namespace bagua::nccl_net {
namespace {

constexpr int64_t kHelloNs = 10 * kNsPerS;  // limit from accepting a socket to its complete Hello
constexpr size_t kMaxGroups = 256;
constexpr uint64_t kLoggedDrops = 10;  // per listener, so that many strangers do not flood the log

void fill_handle(const Address& address, const Nonce& nonce, Handle* handle) {
  *handle = {};
  handle->magic = Handle::kMagic;
  handle->version = kProtocolVersion;
  handle->nonce = nonce;
  if (address.any.sa_family == AF_INET) {
    handle->family = 4;
    std::memcpy(handle->address, &address.v4.sin_addr, sizeof address.v4.sin_addr);
    handle->port = ntohs(address.v4.sin_port);
  } else {
    handle->family = 6;
    std::memcpy(handle->address, &address.v6.sin6_addr, sizeof address.v6.sin6_addr);
    handle->port = ntohs(address.v6.sin6_port);
    handle->link_local = IN6_IS_ADDR_LINKLOCAL(&address.v6.sin6_addr) ? 1 : 0;
  }
}

// True if there is nothing to read. The connecting side sends nothing between Hello and Answer, so readable means
// closed.
bool silent(const Fd& socket) {
  char byte;
  return ::recv(socket.get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT) < 0 && errno == EAGAIN;
}

}  // namespace

Status Listener::open(const Device& device, Handle* handle, std::unique_ptr<Listener>* out) {
  auto listener = std::make_unique<Listener>();
  if (Status status = fill_random(&listener->nonce_, sizeof listener->nonce_); !status) return status;
  std::string bound;
  if (Status status = listen_tcp(address_text(device.address), &listener->socket_, &bound); !status) return status;
  Address here{};
  socklen_t length = sizeof here;
  if (::getsockname(listener->socket_.get(), &here.any, &length) != 0) {
    return {Code::kInternal, "getsockname: " + errno_text(errno)};
  }
  fill_handle(here, listener->nonce_, handle);
  *out = std::move(listener);
  return Status::ok();
}

Status Listener::accept(std::unique_ptr<ReceiveConnection>* out) {
  if (Status status = take_new(); !status) return status;
  for (size_t i = 0; i < strangers_.size();) {
    if (read_hello(&strangers_[i])) {
      ++i;
    } else {
      strangers_.erase(strangers_.begin() + static_cast<ptrdiff_t>(i));
    }
  }
  drop_late();
  const auto whole = std::find_if(groups_.begin(), groups_.end(),
                                  [](const Group& group) { return group.present == group.sockets.size(); });
  if (whole == groups_.end()) return Status::ok();
  Group group = std::move(*whole);
  groups_.erase(whole);
  const Answer answer{Answer::kMagic, kProtocolVersion, 1};
  if (!std::all_of(group.sockets.begin(), group.sockets.end(), silent)) {
    BAGUA_NET_INFO("the connection from " + group.peer + " was given up before it was accepted");
    return Status::ok();
  }
  const ssize_t put = ::send(group.sockets.front().get(), &answer, sizeof answer, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (put != sizeof answer) {
    BAGUA_NET_INFO("the connection from " + group.peer + " broke before it was complete");
    return Status::ok();  // the connecting side tries again
  }
  *out = std::make_unique<ReceiveConnection>(std::move(group.sockets), group.peer);
  return Status::ok();
}

Status Listener::take_new() {
  if (pause_.lasts(now_ns())) return Status::ok();
  for (size_t taken = 0; taken < kMaxStrangers; ++taken) {
    Stranger stranger{};
    const Status status = accept_tcp(socket_.get(), &stranger.socket, &stranger.peer);
    if (status.code() == Code::kResource) return wait_for_descriptors(status);
    lacking_since_ns_ = -1;
    if (!status) break;
    stranger.deadline_ns = now_ns() + kHelloNs;
    if (strangers_.size() == kMaxStrangers) {
      const auto crowd = strangers_.begin() + static_cast<ptrdiff_t>(crowding(strangers_));
      drop(*crowd, "too many connections wait for their greeting");
      strangers_.erase(crowd);
    }
    if (read_hello(&stranger)) strangers_.push_back(std::move(stranger));
  }
  return Status::ok();
}

// Connections wait in the kernel's queue, as long as the other side would wait for a connection.
Status Listener::wait_for_descriptors(const Status& why) {
  const int64_t now = now_ns();
  const std::string text = pause_.begin(why.message(), now);
  if (!text.empty()) BAGUA_NET_WARN(text);
  if (lacking_since_ns_ < 0) lacking_since_ns_ = now;
  const bool over = now - lacking_since_ns_ >= settings().connect_timeout_s * kNsPerS;
  return over ? Status(why.code(), "can't accept connections: " + why.message()) : Status::ok();
}

bool Listener::read_hello(Stranger* stranger) {
  char* at = reinterpret_cast<char*>(&stranger->hello) + stranger->got;
  const ssize_t got = ::recv(stranger->socket.get(), at, sizeof(Hello) - stranger->got, MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return true;
  if (got <= 0) {
    drop(*stranger, "it closed before its greeting was complete");
    return false;
  }
  stranger->got += static_cast<size_t>(got);
  if (stranger->got >= sizeof stranger->hello.magic && stranger->hello.magic != Hello::kMagic) {
    drop(*stranger, "it is no connection of this plugin");
    return false;
  }
  if (stranger->got < sizeof(Hello)) return true;
  admit(stranger);
  return false;
}

void Listener::admit(Stranger* stranger) {
  const Hello& hello = stranger->hello;
  if (!hello.nonce.equals(nonce_)) return drop(*stranger, "it does not know the handle's secret");
  if (hello.version != kProtocolVersion) {
    const Answer answer{Answer::kMagic, kProtocolVersion, 0};
    static_cast<void>(::send(stranger->socket.get(), &answer, sizeof answer, MSG_NOSIGNAL | MSG_DONTWAIT));
    BAGUA_NET_WARN("refused a connection from " + stranger->peer + ": it speaks version " +
                   std::to_string(hello.version) + " of the protocol, this process version " +
                   std::to_string(kProtocolVersion) + "; use the same bagua on all hosts");
    return;
  }
  if (hello.streams < 1 || hello.streams > kMaxStreams || hello.index > hello.streams) {
    return drop(*stranger, "its greeting names an impossible socket");
  }
  auto group = std::find_if(groups_.begin(), groups_.end(),
                            [&](const Group& item) { return item.connection.equals(hello.connection); });
  if (group == groups_.end()) {
    if (groups_.size() == kMaxGroups) return drop(*stranger, "too many connections are incomplete");
    groups_.push_back({hello.connection, stranger->peer, now_ns() + settings().connect_timeout_s * kNsPerS, 0, {}});
    group = groups_.end() - 1;
    group->sockets.resize(size_t{hello.streams} + 1);
  }
  if (group->sockets.size() != size_t{hello.streams} + 1 || group->sockets[hello.index].valid()) {
    return drop(*stranger, "its greeting does not fit the others of its connection");
  }
  group->sockets[hello.index] = std::move(stranger->socket);
  ++group->present;
}

void Listener::drop(const Stranger& stranger, const std::string& reason) {
  if (dropped_++ < kLoggedDrops) BAGUA_NET_INFO("dropped a connection from " + stranger.peer + ": " + reason);
}

void Listener::drop_late() {
  const int64_t now = now_ns();
  while (!strangers_.empty() && strangers_.front().deadline_ns < now) {
    drop(strangers_.front(), "it sent no greeting in time");
    strangers_.erase(strangers_.begin());
  }
  while (!groups_.empty() && groups_.front().deadline_ns < now &&
         groups_.front().present < groups_.front().sockets.size()) {
    BAGUA_NET_INFO("a connection from " + groups_.front().peer + " did not become complete in time");
    groups_.erase(groups_.begin());
  }
}

}  // namespace bagua::nccl_net
