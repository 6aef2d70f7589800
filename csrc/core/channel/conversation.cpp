#include "channel/conversation.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/clock.h"
#include "base/text.h"
#include "channel/lifeline.h"

namespace bagua {

namespace {

Status wait_readable(int fd, int64_t deadline_ns) {
  for (;;) {
    const int64_t left = deadline_ns - now_ns();
    if (left <= 0) return {Code::kTimeout, "the node daemon did not answer in time"};
    pollfd watched{fd, POLLIN, 0};
    const int ready = poll(&watched, 1, static_cast<int>(std::min<int64_t>(left / 1'000'000 + 1, 1000)));
    if (ready > 0) return Status::ok();
    if (ready < 0 && errno != EINTR) return {Code::kUnavailable, std::string("polling failed: ") + errno_text(errno)};
  }
}

}  // namespace

Status dial(const std::string& path, int64_t deadline_ns, Fd* out) {
  UnixAddress address;
  if (Status status = unix_address(path, &address); !status) return status;
  *out = Fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!out->valid()) return {Code::kResource, std::string("no Unix socket could be made: ") + errno_text(errno)};
  while (::connect(out->get(), reinterpret_cast<sockaddr*>(address.storage), address.length) != 0) {
    if (errno == EINTR) continue;
    if (errno != EAGAIN || now_ns() >= deadline_ns) {
      return {Code::kUnavailable, "the node daemon's socket " + path + " can't be reached: " + errno_text(errno) +
                                      ". Is the daemon running, and the job still there?"};
    }
    poll(nullptr, 0, 5);  // EAGAIN: the queue is full, and the kernel tells nobody when it drains
  }
  return Status::ok();
}

std::vector<char> packet_of(const Request& request, const std::vector<int>& members) {
  std::vector<char> packet(sizeof request + members.size() * sizeof(uint32_t));
  memcpy(packet.data(), &request, sizeof request);
  for (size_t i = 0; i < members.size(); ++i) {
    const uint32_t member = static_cast<uint32_t>(members[i]);
    memcpy(packet.data() + sizeof request + i * sizeof member, &member, sizeof member);
  }
  return packet;
}

Status greet(int socket, int member, const uint8_t* token, int64_t deadline_ns, Reply* reply,
             std::vector<Fd>* descriptors, bool* answered) {
  Request hello;
  hello.type = Message::kHello;
  hello.version = kLayoutVersion;
  hello.member = static_cast<uint32_t>(member);
  memcpy(hello.token, token, kTokenBytes);
  return converse(socket, packet_of(hello, {}), lifeline(), deadline_ns, reply, descriptors, answered);
}

Status converse(int socket, const std::vector<char>& packet, int descriptor, int64_t deadline_ns, Reply* reply,
                std::vector<Fd>* descriptors, bool* answered) {
  *answered = false;
  Status status = send_packet(socket, packet.data(), packet.size(), &descriptor, descriptor < 0 ? 0 : 1);
  size_t bytes = 0;
  while (status) {
    status = wait_readable(socket, deadline_ns);
    if (!status) break;
    status = receive_packet(socket, reply, sizeof *reply, &bytes, descriptors);
    if (status.code() != Code::kTimeout) break;
    status = Status::ok();
  }
  if (status.code() == Code::kUnavailable || (status && bytes == 0)) {
    return {Code::kUnavailable, "the node daemon is gone: its end of the socket was closed"};
  }
  if (status && (bytes != sizeof *reply || reply->magic != kProtocolMagic)) {
    status = {Code::kCorrupt, "the node daemon answered with something unknown"};
  }
  if (!status) {
    shutdown(socket, SHUT_RDWR);  // the answer may still come and would be taken for that of the next request
    return status;
  }
  *answered = true;
  reply->text[kReplyText - 1] = '\0';
  return {static_cast<Code>(reply->code), reply->text};
}

}  // namespace bagua
