#include "base/fd.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

#include "base/text.h"

namespace bagua {

void Fd::reset(int fd) {
  if (fd_ >= 0) ::close(fd_);
  fd_ = fd;
}

Fd duplicate(int fd) {
  return Fd(fcntl(fd, F_DUPFD_CLOEXEC, 0));
}

Status set_nonblocking(int fd) {
  const int flags = ::fcntl(fd, F_GETFL);
  if (flags >= 0 && ::fcntl(fd, F_SETFL, flags | O_NONBLOCK) == 0) return Status::ok();
  return {Code::kInternal, "can't make a descriptor non-blocking: " + errno_text(errno)};
}

Status EventFd::open() {
  fd_.reset(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (fd_.valid()) return Status::ok();
  return {Code::kResource, "can't create an eventfd: " + errno_text(errno)};
}

void EventFd::signal() const {
  const uint64_t one = 1;
  // A write to a valid eventfd fails only if its counter is full. Then it is readable already.
  while (::write(fd_.get(), &one, sizeof one) < 0 && errno == EINTR) {
  }
}

void EventFd::drain() const {
  uint64_t count;
  while (::read(fd_.get(), &count, sizeof count) < 0 && errno == EINTR) {
  }
}

}  // namespace bagua
