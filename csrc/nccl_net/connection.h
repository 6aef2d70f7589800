// Base class of both ends of a connection: requests, the first error, readiness of the data sockets, statistics.
//
// Threads: NCCL calls a connection from one thread at a time. At the same time helpers (helpers.h) call pump(), which
// uses only data sockets (each under its own mutex) and members that mutex_ guards.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/fd.h"
#include "base/mutex.h"
#include "nccl_net/nccl_net_abi.h"
#include "net/socket.h"

namespace bagua::nccl_net {

class Connection;
class Helper;

// An isend or irecv whose completion has not been reported to NCCL yet.
struct Request {
  // The value of `left` before the size of a message to receive is known.
  static constexpr int64_t kUnknown = int64_t{1} << 62;

  Connection* owner = nullptr;
  bool used = false;  // the slot is taken; mutex_ of the connection
  char* data = nullptr;
  size_t capacity = 0;  // bytes to send, or room for bytes to receive
  uint64_t message = 0;
  uint64_t total = 0;            // bytes of the message
  bool sized = false;            // total is known; mutex_ of the connection
  uint64_t begun = 0;            // bytes of total whose headers have arrived; mutex_ of the connection
  std::atomic<int64_t> left{0};  // bytes, and 1 for the header of a small message to send; 0: complete

  bool complete() const { return left.load(std::memory_order_acquire) == 0; }
  // After the call that completes it, the request may be reused at any moment.
  void finish(int64_t amount) { left.fetch_sub(amount, std::memory_order_acq_rel); }
};

// A data socket. Only the thread that holds `mutex` moves bytes.
struct Stream {
  Fd socket;
  size_t number = 0;  // from 1, because 0 is the control socket
  Mutex mutex;
  std::atomic<bool> ready{true};     // false: the kernel had no room, or no bytes, and has not reported any since
  std::atomic<bool> hung_up{false};  // the peer has closed its end or is lost
  std::atomic<uint64_t> bytes{0};    // of payload
  std::atomic<uint64_t> stalls{0};   // how often the kernel had no room, or no bytes
};

class Connection {
 public:
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;
  virtual ~Connection();

  // Moves bytes without waiting. Sets `done` if `request` is complete; then its slot is free again.
  Result test(Request* request, int* done, int* sizes);
  // NCCL takes this memory back, maybe with requests in flight: stops reading and writing it. If it was in use, the
  // connection fails.
  void withdraw(const char* data, size_t size);
  // A helper's turn: one pass over the data sockets. True if bytes were moved.
  virtual bool pump() = 0;
  // True if enough bytes are outstanding for a helper.
  bool wants_help() const;
  int epoll_fd() const { return epoll_.get(); }

 protected:
  Connection(const char* direction, std::string peer);
  void add_stream(Stream* stream, Fd socket);
  // Adds the control and data sockets to epoll, for these events and for the end of the peer.
  Status watch(const Fd& control, uint32_t control_events, uint32_t events);
  bool watched() const { return epoll_.valid(); }
  // Called before a helper serves the connection: adds the sockets to epoll if they are not there yet.
  virtual Status watch_for_helper() = 0;
  virtual void progress() = 0;
  // Says why an incomplete request can never complete, other than by a failure of the connection; "" if it can.
  virtual std::string hopeless(const Request& request) const = 0;
  // Called when NCCL is told that the connection has failed; may be called several times.
  virtual void failed() {}

  // A free slot for the next message, if possible the one that slot_of() tries first; nullptr if there is none.
  Request* take_slot(void* data, size_t size) REQUIRES(mutex_);
  // The slot of a message that is in flight; nullptr if it is not.
  Request* slot_of(uint64_t message) REQUIRES(mutex_);
  // Stores and logs the first error of the connection: "<direction> <peer>: <what>".
  Result fail(Result result, const std::string& what);
  Result failure() const { return failure_.load(std::memory_order_acquire); }
  // Reads epoll events of the sockets. True if a socket became ready.
  bool look();
  // Asks for a helper if there is enough to do.
  void call_helper();
  // Stops helpers and writes the statistics. Each derived destructor calls it first.
  void close();
  bool control_hung_up() const { return control_hung_up_.load(std::memory_order_relaxed); }

  Mutex mutex_;
  Request slots_[kMaxRequests];
  uint64_t next_message_ GUARDED_BY(mutex_) = 0;  // of the next isend or irecv
  std::atomic<int64_t> outstanding_{0};           // bytes of large messages that are not moved yet
  uint64_t inline_bytes_ = 0;                     // payload of small messages; NCCL's thread
  std::string peer_;
  std::atomic<bool> control_ready_{true};  // like Stream::ready

 private:
  void write_stats();

  const char* direction_;
  std::vector<Stream*> streams_;
  Fd epoll_;
  Mutex failure_mutex_;  // locked last: no other mutex is locked while it is held
  std::atomic<Result> failure_{kSuccess};
  std::atomic<bool> control_hung_up_{false};
  bool asked_for_helper_ = false;  // NCCL's thread
  Helper* helper_ = nullptr;       // NCCL's thread
  int64_t opened_ns_;
  bool closed_ = false;
};

}  // namespace bagua::nccl_net
