#include "channel/protocol.h"

#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <cstring>

#include "base/scarcity.h"
#include "base/text.h"

namespace bagua {

namespace {
constexpr size_t kMaxDescriptors = 4;
}

Status unix_address(const std::string& path, UnixAddress* out) {
  sockaddr_un address{};
  if (path.empty() || path.size() >= sizeof address.sun_path) {
    return {Code::kInvalid, "the socket path '" + path + "' has " + std::to_string(path.size()) +
                                " bytes; a Unix socket allows 1 to " + std::to_string(sizeof address.sun_path - 1)};
  }
  address.sun_family = AF_UNIX;
  memcpy(address.sun_path, path.data(), path.size());
  static_assert(sizeof address <= sizeof out->storage, "room for any Unix address");
  memcpy(out->storage, &address, sizeof address);
  out->length = sizeof address;
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
    if (errno == EAGAIN || errno == EWOULDBLOCK) return {Code::kTimeout, "nothing to read"};
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

}  // namespace bagua
