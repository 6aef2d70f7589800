// File descriptors: ownership, flags, and an eventfd that a thread can poll together with sockets.
#pragma once

#include "base/status.h"

namespace bagua {

// Move-only owner of a file descriptor.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(other.release()) {}
  Fd& operator=(Fd&& other) noexcept {
    if (this != &other) reset(other.release());
    return *this;
  }
  ~Fd() { reset(); }
  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  int release() {
    const int fd = fd_;
    fd_ = -1;
    return fd;
  }
  void reset(int fd = -1);

 private:
  int fd_ = -1;
};

// Another descriptor of the same file; not valid if there is none to be had.
Fd duplicate(int fd);

Status set_nonblocking(int fd);

// Readable from signal() until drain(). Any thread may call both. Several signals before a drain() count as one.
class EventFd {
 public:
  Status open();
  int fd() const { return fd_.get(); }
  void signal() const;
  void drain() const;

 private:
  Fd fd_;
};

}  // namespace bagua
