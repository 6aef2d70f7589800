// Sends without a copy into the kernel (MSG_ZEROCOPY). The socket references the sender's pages until the peer has
// acknowledged them, then reports this on its error queue. Internal to the mesh: not thread-safe.
//
// The kernel numbers each send call that takes bytes: from 0 for each socket, modulo 2^32. A notification names a range
// of numbers, both ends included. The kernel joins ranges, and they may come out of order (Linux,
// Documentation/networking/msg_zerocopy.rst). A message is sent when its calls, and all calls before them, are
// complete.
//
// A stream returns to copying if zero copy does not pay: the kernel copies anyway (loopback, veth, a device without
// scatter-gather), does not support it, or has no room to account for it (net.core.optmem_max, RLIMIT_MEMLOCK).
//
// The end of a connection: missing notifications are never reported, and an error of the mesh returns all buffers to
// the caller. The kernel keeps references to the pages, so memory that is freed or unmapped stays valid until TCP is
// done. If the caller writes new values there, TCP may still send them. They reach only peers of a job that has failed
// here, and such a peer rejects them: the checksum was computed before. Mesh::shut_down() resets the data connections,
// which makes the kernel release the pages.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

namespace bagua {

enum class ZeroCopyMode : uint8_t {
  kOff,
  kAuto,    // zero copy until the kernel copies or refuses
  kAlways,  // even where the kernel copies: for tests and measurements
};

// Keeps track of buffers that the kernel still reads, by call numbers. Makes no system calls.
class ZeroCopyLedger {
 public:
  // `first`: the number of the first call.
  explicit ZeroCopyLedger(uint64_t first = 0) : base_(first), next_(first), message_(first) {}
  // Notes that a call has taken bytes of the present message.
  void took();
  // The socket has taken all of the present message. False: no zero-copy call took a part of it, so it is complete.
  bool hold(uint64_t cookie, int64_t since_ns);
  // Calls `first` to `last` are complete: appends, in order, the cookies of messages that are now complete. Ignores
  // numbers that are complete already or were never used.
  void complete(uint32_t first, uint32_t last, std::vector<uint64_t>* cookies);

  bool outstanding() const { return base_ != next_; }
  size_t held() const { return held_.size(); }
  int64_t oldest_ns() const { return held_.front().since_ns; }  // only if held() > 0

 private:
  struct Held {
    uint64_t end;  // complete when base_ reaches this
    uint64_t cookie;
    int64_t since_ns;
  };
  // Call numbers, without the kernel's wrap-around.
  uint64_t base_;              // all calls before it are complete
  uint64_t next_;              // of the next call
  uint64_t message_;           // next_ when the present message began
  std::deque<bool> complete_;  // base_, base_ + 1, ... to next_
  std::deque<Held> held_;
};

// The zero-copy side of one socket.
class ZeroCopy {
 public:
  // Shorter payloads are copied, because pinning pages and reading a notification would cost more.
  static constexpr size_t kMinBytes = 64 << 10;

  // Returns false if the socket does not support it.
  bool enable(int fd, ZeroCopyMode mode);
  // True if a payload of this length should be sent without a copy.
  bool wants(size_t bytes) const { return on_ && bytes >= kMinBytes; }
  // Like send(2) with MSG_ZEROCOPY, or with a copy if the kernel refuses. The end of `data` is the end of a message.
  ssize_t send(int fd, const void* data, size_t bytes);
  bool hold(uint64_t cookie, int64_t since_ns) { return ledger_.hold(cookie, since_ns); }
  // Reads the error queue and appends the cookies of complete messages. False: it had no notification.
  bool reap(int fd, std::vector<uint64_t>* cookies);

  bool enabled() const { return enabled_; }  // notifications may come
  bool on() const { return on_; }
  uint64_t bytes() const { return bytes_; }  // sent with MSG_ZEROCOPY
  const ZeroCopyLedger& ledger() const { return ledger_; }

 private:
  void refused(int error);

  bool enabled_ = false;
  bool on_ = false;
  bool always_ = false;
  uint64_t bytes_ = 0;
  ZeroCopyLedger ledger_;
};

}  // namespace bagua
