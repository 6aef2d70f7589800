#include "transport/zero_copy.h"

#include <linux/errqueue.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

namespace bagua {

namespace {

// SO_ZEROCOPY (Linux 4.14), which some headers lack.
constexpr int kSoZeroCopy = 60;
constexpr int kMsgZeroCopy = 0x4000000;
constexpr uint8_t kOriginZeroCopy = 5;
constexpr uint8_t kCodeCopied = 1;

// Finds the notification in a message of the error queue. False: it is something else (an ICMP error, a time stamp).
bool notification(msghdr* message, sock_extended_err* out) {
  for (cmsghdr* part = CMSG_FIRSTHDR(message); part != nullptr; part = CMSG_NXTHDR(message, part)) {
    const bool v4 = part->cmsg_level == SOL_IP && part->cmsg_type == IP_RECVERR;
    const bool v6 = part->cmsg_level == SOL_IPV6 && part->cmsg_type == IPV6_RECVERR;
    if ((!v4 && !v6) || part->cmsg_len < CMSG_LEN(sizeof *out)) continue;
    std::memcpy(out, CMSG_DATA(part), sizeof *out);
    return out->ee_errno == 0 && out->ee_origin == kOriginZeroCopy;
  }
  return false;
}

}  // namespace

void ZeroCopyLedger::took() {
  ++next_;
  complete_.push_back(false);
}

bool ZeroCopyLedger::hold(uint64_t cookie, int64_t since_ns) {
  const bool ours = next_ != message_ && base_ != next_;
  message_ = next_;
  if (ours) held_.push_back({next_, cookie, since_ns});
  return ours;
}

void ZeroCopyLedger::complete(uint32_t first, uint32_t last, std::vector<uint64_t>* cookies) {
  const uint64_t count = uint64_t{last - first} + 1;
  // A signed distance from base_, because a range may begin before it.
  const int64_t begin = static_cast<int32_t>(first - static_cast<uint32_t>(base_));
  for (size_t i = 0; i < complete_.size(); ++i) {
    const int64_t distance = static_cast<int64_t>(i) - begin;
    if (distance >= 0 && static_cast<uint64_t>(distance) < count) complete_[i] = true;
  }
  while (!complete_.empty() && complete_.front()) {
    complete_.pop_front();
    ++base_;
  }
  while (!held_.empty() && held_.front().end <= base_) {
    cookies->push_back(held_.front().cookie);
    held_.pop_front();
  }
}

bool ZeroCopy::enable(int fd, ZeroCopyMode mode) {
  const int one = 1;
  if (::setsockopt(fd, SOL_SOCKET, kSoZeroCopy, &one, sizeof one) != 0) return false;
  enabled_ = on_ = true;
  always_ = mode == ZeroCopyMode::kAlways;
  return true;
}

// With MSG_EOR the kernel never puts the end of this message and the beginning of the next into one buffer, so it does
// not join their notifications: a message completes when it has arrived, even if the next one is delayed.
ssize_t ZeroCopy::send(int fd, const void* data, size_t bytes) {
  constexpr int kFlags = MSG_NOSIGNAL | MSG_DONTWAIT | MSG_EOR;
  if (on_) {
    const ssize_t put = ::send(fd, data, bytes, kFlags | kMsgZeroCopy);
    if (put > 0) {
      ledger_.took();
      bytes_ += static_cast<uint64_t>(put);
    }
    if (put >= 0 || errno == EINTR || errno == EAGAIN || errno == EWOULDBLOCK) return put;
    if (errno != ENOBUFS && errno != EOPNOTSUPP && errno != EFAULT) return put;
    refused(errno);
  }
  return ::send(fd, data, bytes, kFlags);
}

// ENOBUFS with outstanding calls: these have used up the limit, and there will be room when they complete; only this
// call copies. EFAULT: memory that can be read but not pinned, such as device memory.
void ZeroCopy::refused(int error) {
  if (error != ENOBUFS || !ledger_.outstanding()) on_ = false;
}

bool ZeroCopy::reap(int fd, std::vector<uint64_t>* cookies) {
  bool any = false;
  for (;;) {
    alignas(cmsghdr) char space[256];
    msghdr message{};
    message.msg_control = space;
    message.msg_controllen = sizeof space;
    if (::recvmsg(fd, &message, MSG_ERRQUEUE | MSG_DONTWAIT) < 0) {
      if (errno == EINTR) continue;
      return any;
    }
    sock_extended_err notice{};
    if (!notification(&message, &notice)) continue;
    any = true;
    ledger_.complete(notice.ee_info, notice.ee_data, cookies);
    if (notice.ee_code == kCodeCopied && !always_) on_ = false;
  }
}

}  // namespace bagua
