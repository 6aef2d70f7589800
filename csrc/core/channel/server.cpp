#include "channel/server.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/clock.h"
#include "base/text.h"
#include "base/wire_version.h"
#include "channel/layout.h"

namespace bagua {

namespace {

constexpr int64_t kHelloDeadlineNs = 10'000'000'000;
constexpr size_t kMaxStrangers = 128;

Status system_error(const std::string& what) {
  return {Code::kResource, what + ": " + errno_text(errno)};
}

}  // namespace

Status ChannelServer::start() {
  sockaddr_un address;
  if (Status status = unix_address(path_, &address); !status) return status;
  listener_ = Fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!listener_.valid()) return system_error("no Unix socket could be made");
  unlink(path_.c_str());
  if (fchmod(listener_.get(), 0600) != 0) return system_error("the mode of " + path_ + " can't be set");
  if (bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
    return system_error("the socket " + path_ + " can't be made");
  }
  if (chmod(path_.c_str(), 0600) != 0) return system_error("the mode of " + path_ + " can't be set");
  if (uid_ != getuid() && chown(path_.c_str(), uid_, static_cast<gid_t>(-1)) != 0) {
    return system_error("the owner of " + path_ + " can't be set");
  }
  if (listen(listener_.get(), 256) != 0) return system_error("listening on " + path_ + " failed");
  if (Status status = stop_event_.open(); !status) return status;
  buffer_.resize(kMaxRequest);
  thread_ = std::thread([this] { run(); });
  return Status::ok();
}

void ChannelServer::stop() {
  if (!thread_.joinable()) {
    listener_.reset();
    return;
  }
  stopping_.store(true);
  stop_event_.signal();
  thread_.join();
  connections_.clear();
  listener_.reset();
  unlink(path_.c_str());
}

void ChannelServer::run() {
  std::vector<pollfd> watched;
  while (!stopping_.load()) {
    watched.clear();
    watched.push_back({stop_event_.fd(), POLLIN, 0});
    const int64_t now = now_ns();
    watched.push_back({pause_.lasts(now) ? -1 : listener_.get(), POLLIN, 0});
    bool strangers = false;
    for (const Connection& connection : connections_) {
      watched.push_back({connection.socket.get(), POLLIN, 0});
      watched.push_back({connection.process.get(), POLLIN, 0});  // -1 is ignored
      watched.push_back({connection.death != nullptr ? connection.death->fd() : -1, POLLIN, 0});
      strangers = strangers || connection.member < 0;
    }
    if (poll(watched.data(), watched.size(), pause_.timeout_ms(strangers ? 1000 : -1, now)) < 0 && errno != EINTR)
      break;
    const size_t known = connections_.size();
    for (size_t i = 0; i < known; ++i) {
      Connection& connection = connections_[i];
      const pollfd* const seen = &watched[2 + 3 * i];
      if (seen[0].revents != 0) read(&connection);
      if (!connection.gone && (seen[1].revents != 0 || seen[2].revents != 0)) {
        read(&connection);  // a goodbye may still lie in the socket
        if (!connection.gone) close(&connection, false);
      }
    }
    if (watched[1].revents != 0) accept_all();
    if (strangers) drop_idle(now_ns());
    connections_.erase(
        std::remove_if(connections_.begin(), connections_.end(), [](const Connection& c) { return c.gone; }),
        connections_.end());
  }
}

void ChannelServer::accept_all() {
  for (;;) {
    Fd socket(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket.valid()) {
      if (!is_scarcity(errno)) return;
      const std::string text = pause_.begin(scarcity_text(errno), now_ns());
      if (!text.empty()) handler_->scarce("from ranks, " + text);
      return;
    }
    ucred peer{};
    socklen_t length = sizeof peer;
    if (getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0 || peer.uid != uid_) {
      handler_->bad_connection();
      continue;
    }
    const auto stranger = [](const Connection& c) { return c.member < 0 && !c.gone; };
    if (static_cast<size_t>(std::count_if(connections_.begin(), connections_.end(), stranger)) >= kMaxStrangers) {
      close(&*std::find_if(connections_.begin(), connections_.end(), stranger), true);  // the oldest
    }
    Connection connection;
    connection.socket = std::move(socket);
    connection.pid = peer.pid;
    connection.since_ns = now_ns();
    connections_.push_back(std::move(connection));
  }
}

void ChannelServer::drop_idle(int64_t now) {
  for (Connection& connection : connections_) {
    if (!connection.gone && connection.member < 0 && now - connection.since_ns > kHelloDeadlineNs) {
      close(&connection, true);
    }
  }
}

void ChannelServer::read(Connection* connection) {
  for (int handled = 0; handled < 64 && !connection->gone; ++handled) {
    size_t bytes = 0;
    std::vector<Fd> passed;
    const Status status = receive_packet(connection->socket.get(), buffer_.data(), buffer_.size(), &bytes, &passed);
    if (status.code() == Code::kTimeout) return;
    if (status.code() == Code::kResource) {  // its descriptors are lost, and with them what it asks for
      if (!reply(connection, status)) close(connection, false);
      continue;
    }
    if (!status || bytes == 0) {
      close(connection, status.code() == Code::kCorrupt);
      return;
    }
    Request request;
    std::vector<int> ranks;
    std::string words;
    bool fits = bytes >= sizeof request;
    if (fits) {
      memcpy(&request, buffer_.data(), sizeof request);
      const uint32_t n = request.type == Message::kComm ? request.members : 0;
      const bool last = request.type == Message::kBye || request.type == Message::kFailed;
      const size_t text = last ? request.members : 0;
      fits = request.magic == kProtocolMagic && n <= kMaxMembers && text <= kMaxWords &&
             bytes == sizeof request + n * sizeof(uint32_t) + text;
      if (fits) words.assign(buffer_.data() + sizeof request, text);
      for (uint32_t i = 0; fits && i < n; ++i) {
        uint32_t rank;
        memcpy(&rank, buffer_.data() + sizeof request + i * sizeof rank, sizeof rank);
        ranks.push_back(rank > INT32_MAX ? -1 : static_cast<int>(rank));
      }
    }
    if (!fits || !handle(connection, request, ranks, words, passed)) close(connection, true);
  }
}

bool ChannelServer::handle(Connection* connection, const Request& request, const std::vector<int>& ranks,
                           const std::string& words, const std::vector<Fd>& passed) {
  if (request.type == Message::kHello) return hello(connection, request, passed);
  if (connection->member < 0) return false;
  const int member = connection->member;
  switch (request.type) {
    case Message::kAlloc:
    case Message::kAllocForPeers: {
      Fd descriptor;
      uint64_t id = 0, size = 0;
      const bool for_peers = request.type == Message::kAllocForPeers;
      const Status status = handler_->alloc(member, request.value, for_peers, &descriptor, &id, &size);
      return reply(connection, status, id, size, &descriptor, status ? 1 : 0);
    }
    case Message::kBorrow: {
      Fd descriptor;
      uint64_t size = 0;
      const Status status = handler_->borrow(member, request.member, request.value, &descriptor, &size);
      return reply(connection, status, request.value, size, &descriptor, status ? 1 : 0);
    }
    case Message::kRequire:
      return reply(connection, handler_->require(member, request.value));
    case Message::kOffer:
      if (passed.size() != 1) return false;
      return reply(connection, handler_->adopt(member, request.value, passed.front()));
    case Message::kFree:
      return reply(connection, handler_->free_segment(member, request.value));
    case Message::kComm: {
      uint32_t room = 0;
      const Status status = handler_->declare(member, request.value, request.generation, ranks, &room);
      return reply(connection, status, room);
    }
    case Message::kDestroyComm:
      return reply(connection, handler_->destroy(member, request.value, request.generation));
    case Message::kEnter: {
      Fd page;
      const Status status = handler_->enter(member, request.value, &page);
      const bool none = status.code() == Code::kTimeout;
      return reply(connection, none ? Status::ok() : status, 0, 0, &page, status ? 1 : 0);
    }
    case Message::kBye:
      reply(connection, Status::ok());
      connection->member = -1;
      close(connection, false);
      handler_->left(member, words);
      return true;
    case Message::kFailed: {
      reply(connection, Status::ok());
      const pid_t pid = connection->pid;
      connection->member = -1;
      close(connection, false);
      handler_->failed(member, pid, request.value == 1, words);
      return true;
    }
    default:
      return false;
  }
}

bool ChannelServer::hello(Connection* connection, const Request& request, const std::vector<Fd>& passed) {
  if (connection->member >= 0) return false;
  Status status;
  Fd descriptors[3];
  if (request.version != wire_version) {
    status = {Code::kInvalid, other_wire_version("the node daemon", wire_version, request.version)};
  } else {
    status = handler_->join(request.member, request.token, connection->pid, descriptors);
  }
  if (!status) {
    handler_->bad_connection();
    reply(connection, status);
    close(connection, false);
    return true;
  }
  connection->member = static_cast<int>(request.member);
  if (connection->pid > 0 && connection->pid != getpid()) {
    connection->process = Fd(static_cast<int>(syscall(SYS_pidfd_open, connection->pid, 0)));
    if (passed.size() == 1) connection->death = DeathWatch::create(passed.front(), connection->pid);
  }
  return reply(connection, status, 0, sizeof(RankChannel), descriptors, 3);
}

bool ChannelServer::reply(Connection* connection, const Status& status, uint64_t value, uint64_t bytes,
                          const Fd* passed, int n) {
  int fds[3] = {};
  for (int i = 0; i < n; ++i) fds[i] = passed[i].get();
  if (std::any_of(fds, fds + n, [](int fd) { return fd < 0; })) {
    return reply(connection, {Code::kResource, scarcity_text(EMFILE)});
  }
  Reply answer;
  answer.code = static_cast<uint32_t>(status.code());
  answer.value = value;
  answer.bytes = bytes;
  status.message().copy(answer.text, kReplyText - 1);
  return send_packet(connection->socket.get(), &answer, sizeof answer, fds, n).is_ok();
}

void ChannelServer::close(Connection* connection, bool misbehaved) {
  if (connection->gone) return;
  connection->gone = true;
  connection->socket.reset();
  connection->process.reset();
  connection->death.reset();
  if (misbehaved) handler_->bad_connection();
  if (connection->member >= 0) handler_->lost(connection->member, connection->pid);
}

}  // namespace bagua
