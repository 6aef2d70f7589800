// Sends without a copy into the kernel (MSG_ZEROCOPY): the socket keeps the sender's pages until TCP has had them
// acknowledged, and reports that on its error queue. Internal to the mesh: not thread-safe.
//
// Every call that takes bytes has a number, counted from 0 for each socket, modulo 2^32. A notification names a range
// of numbers, both ends included; the kernel joins ranges, and they may come out of order (Linux,
// Documentation/networking/msg_zerocopy.rst). A message is sent when the calls that took it, and all before them, are
// complete.
//
// Where it can't pay it is given up for the stream: where the kernel copies after all (loopback, veth, a device without
// scatter-gather), says that it can't, or has no room to account for it (net.core.optmem_max, RLIMIT_MEMLOCK).
//
// The end of a connection: a message whose notification has not come is never reported, and the error of its mesh gives
// all buffers back to the caller. The kernel holds references to the pages: memory that is freed or unmapped stays
// there until TCP is done with it. If the caller writes new values there, bytes that TCP still sends (or sends again)
// may have them. They can reach only the peers of a job that has failed here, and a peer that does not know it yet
// finds the checksum wrong, which was computed before: it never takes them for a message. Mesh::shut_down() resets the
// data connections; then the kernel lets go of what it had queued.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

namespace bagua {

enum class ZeroCopyMode : uint8_t {
  kOff,
  kAuto,    // until the kernel copies or refuses
  kAlways,  // even where the kernel copies: for tests and measurements
};

// Buffers that the kernel still reads, by the numbers of calls. No system calls.
class ZeroCopyLedger {
 public:
  // `first`: the number of the first call.
  explicit ZeroCopyLedger(uint64_t first = 0) : base_(first), next_(first), message_(first) {}
  // A call took bytes of the present message.
  void took();
  // The present message is in the socket. False: no call took a part of it, and nobody waits for it.
  bool hold(uint64_t cookie, int64_t since_ns);
  // The calls `first` to `last` are complete: appends the cookies of messages that are complete now, in their order.
  // Numbers that are complete already, or were never given, are ignored.
  void complete(uint32_t first, uint32_t last, std::vector<uint64_t>* cookies);

  bool outstanding() const { return base_ != next_; }
  size_t held() const { return held_.size(); }
  int64_t oldest_ns() const { return held_.front().since_ns; }  // only if held() > 0

 private:
  struct Held {
    uint64_t end;  // complete when base_ has come here
    uint64_t cookie;
    int64_t since_ns;
  };
  // Numbers without the kernel's wrap.
  uint64_t base_;              // all before it are complete
  uint64_t next_;              // of the next call
  uint64_t message_;           // next_ when the present message began
  std::deque<bool> complete_;  // base_, base_ + 1, ... to next_
  std::deque<Held> held_;
};

// The zero-copy side of one socket.
class ZeroCopy {
 public:
  // Shorter payloads are copied: pinning pages and reading the notification cost more.
  static constexpr size_t kMinBytes = 64 << 10;

  // False: the socket can't.
  bool enable(int fd, ZeroCopyMode mode);
  // Whether to send a payload of that length so.
  bool wants(size_t bytes) const { return on_ && bytes >= kMinBytes; }
  // As send(2), with MSG_ZEROCOPY; where the kernel refuses that, with a copy. The end of `data` is the end of a
  // message.
  ssize_t send(int fd, const void* data, size_t bytes);
  bool hold(uint64_t cookie, int64_t since_ns) { return ledger_.hold(cookie, since_ns); }
  // Takes what the error queue holds, appends the cookies of complete messages. False: it held nothing of ours.
  bool reap(int fd, std::vector<uint64_t>* cookies);

  bool enabled() const { return enabled_; }  // notifications may come
  bool on() const { return on_; }
  uint64_t bytes() const { return bytes_; }  // handed over without a copy by us
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
