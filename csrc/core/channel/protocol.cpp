#include "channel/protocol.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "base/clock.h"
#include "base/scarcity.h"
#include "base/text.h"
#include "base/wire_version.h"
#include "channel/lifeline.h"
#include "net/socket.h"

namespace bagua {

namespace {
constexpr size_t kMaxDescriptors = 4;
}

Status unix_address(const std::string& path, sockaddr_un* out) {
  *out = {};
  if (path.empty() || path.size() >= sizeof out->sun_path) {
    return {Code::kInvalid, "the socket path '" + path + "' has " + std::to_string(path.size()) +
                                " bytes; a Unix socket allows 1 to " + std::to_string(sizeof out->sun_path - 1)};
  }
  out->sun_family = AF_UNIX;
  memcpy(out->sun_path, path.data(), path.size());
  return Status::ok();
}

Status send_packet(int fd, const void* data, size_t bytes, const int* descriptors, int n) {
  iovec part{const_cast<void*>(data), bytes};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMaxDescriptors)] = {};
  if (n > 0) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(sizeof(int) * static_cast<size_t>(n));
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int) * static_cast<size_t>(n));
    memcpy(CMSG_DATA(header), descriptors, sizeof(int) * static_cast<size_t>(n));
  }
  for (;;) {
    const ssize_t sent = sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent >= 0) return Status::ok();
    if (errno != EINTR) return {Code::kUnavailable, std::string("sending failed: ") + errno_text(errno)};
  }
}

Status receive_packet(int fd, void* data, size_t capacity, size_t* bytes, std::vector<Fd>* descriptors) {
  iovec part{data, capacity};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMaxDescriptors)];
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  ssize_t got;
  do {
    got = recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  } while (got < 0 && errno == EINTR);
  if (got < 0) {
    if (errno == EAGAIN) return {Code::kTimeout, "nothing to read"};
    return {Code::kUnavailable, std::string("receiving failed: ") + errno_text(errno)};
  }
  size_t passed = 0;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const size_t n = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    passed += n;
    for (size_t i = 0; i < n; ++i) {
      int descriptor;
      memcpy(&descriptor, CMSG_DATA(header) + i * sizeof(int), sizeof descriptor);
      Fd owner(descriptor);  // closed at once when nobody asked for it
      if (descriptors != nullptr) descriptors->push_back(std::move(owner));
    }
  }
  const bool cut = message.msg_flags & MSG_CTRUNC;
  if (message.msg_flags & MSG_TRUNC || (cut && passed == kMaxDescriptors)) {
    return {Code::kCorrupt, "a message larger than any of ours"};
  }
  if (cut) return {Code::kResource, scarcity_text(EMFILE)};
  *bytes = static_cast<size_t>(got);
  return Status::ok();
}

Status dial(const std::string& path, int64_t deadline_ns, Fd* out) {
  sockaddr_un address;
  if (Status status = unix_address(path, &address); !status) return status;
  *out = Fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!out->valid()) return {Code::kResource, std::string("no Unix socket could be made: ") + errno_text(errno)};
  while (::connect(out->get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
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

Status converse(int socket, const std::vector<char>& packet, int descriptor, int64_t deadline_ns, Reply* reply,
                std::vector<Fd>* descriptors, bool* answered) {
  *answered = false;
  Status status = send_packet(socket, packet.data(), packet.size(), &descriptor, descriptor < 0 ? 0 : 1);
  size_t bytes = 0;
  while (status) {
    status = wait_ready(socket, POLLIN, deadline_ns);
    if (status.code() == Code::kTimeout) status = {Code::kTimeout, "the node daemon did not answer in time"};
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

Status greet(int socket, int member, const uint8_t* token, int64_t deadline_ns, std::vector<Fd>* descriptors,
             bool* answered) {
  Request hello;
  hello.version = wire_version;
  hello.member = static_cast<uint32_t>(member);
  memcpy(hello.token, token, kTokenBytes);
  Reply reply;
  const Status status = converse(socket, packet_of(hello, {}), lifeline(), deadline_ns, &reply, descriptors, answered);
  if (status && (descriptors->size() != 3 || reply.bytes != sizeof(RankChannel))) {
    return {Code::kCorrupt, "the node daemon's answer lacks the shared memory"};
  }
  return status;
}

}  // namespace bagua
