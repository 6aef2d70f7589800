// The sending end of a connection.
#pragma once

#include <memory>
#include <vector>

#include "base/mutex.h"
#include "nccl_net/connection.h"
#include "nccl_net/wire.h"
#include "transport/stream_count.h"

namespace bagua::nccl_net {

// Decides by trials whether the connections to a host use one data socket or several. If one socket fills the link,
// several compete, and the oldest message, for which NCCL waits, is late. A trial covers all connections to the host: a
// single connection with more sockets would only take bandwidth from the others and look faster.
class SendHost {
 public:
  // Returns the SendHost of a peer's "address:port". It lives until the process ends, so that later connections use its
  // results, too.
  static SendHost* of(const std::string& peer);
  bool spreads() const { return spreads_.load(std::memory_order_relaxed); }
  // Counts bytes that the kernel has taken.
  void sent(size_t bytes) { sent_.fetch_add(bytes, std::memory_order_relaxed); }
  // Changes the number of connections that wait for room by `change` (-1, 0 or 1), from `now` on.
  void tell(int64_t now, int change);

 private:
  std::atomic<uint64_t> sent_{0};
  std::atomic<bool> spreads_{false};
  Mutex mutex_;
  StreamCount count_ GUARDED_BY(mutex_);
  int64_t told_ns_ GUARDED_BY(mutex_) = 0;
  int waiting_ GUARDED_BY(mutex_) = 0;  // connections
};

class SendConnection final : public Connection {
 public:
  // `sockets` are non-blocking and have exchanged Hello and Answer: the control socket, then the data sockets. Returns
  // nullptr, with the reason, if the kernel refuses.
  static std::unique_ptr<SendConnection> open(std::vector<Fd> sockets, const std::string& peer, Status* status);
  ~SendConnection() override;

  // Begins to send. *request is nullptr if kMaxRequests requests are in flight.
  Result isend(void* data, size_t size, Request** request);
  bool pump() override;

 private:
  // A chunk that is being sent.
  struct Chunk {
    Request* request = nullptr;
    Header header;
    size_t header_left = 0;
    const char* data = nullptr;
    size_t left = 0;
  };
  static constexpr size_t kMostChunks = 8;  // chunks per call
  struct SendStream : Stream {
    // Guarded by mutex: claimed chunks in order, from `first` on.
    Chunk chunks[kMostChunks];
    size_t first = 0;
    size_t count = 0;
    uint64_t claimed = 0;              // bytes of the claimed chunks
    uint64_t takes = 0;                // bytes to claim; grows while the kernel takes all at once
    std::atomic<bool> partial{false};  // an unfinished chunk waits for room
  };
  // Bytes for the control socket, in the order of messages.
  struct Control {
    Request* request;
    SmallHeader header;
    char zeros[kPaddedBytes - sizeof(SmallHeader)];  // sent with the header
    size_t header_bytes;
    size_t sent;  // of header and payload
    size_t size;
  };

  SendConnection(std::vector<Fd> sockets, const std::string& peer);
  Status watch_for_helper() override {
    return Status::ok();
  }  // watched from the beginning, which costs little: only sockets without room cause events
  void progress() override;
  std::string hopeless(const Request& request) const override;
  void failed() override { stop_waiting(); }
  void queue_small(Request* request, size_t size);
  bool holds() const;
  bool flush(bool again);
  void flush_control();
  void control_sent(size_t bytes);
  bool turn();
  void count_streams(int64_t now);
  void stop_waiting();
  bool pass(bool spread);
  void refused(SendStream* stream);
  bool serve(SendStream* stream, bool begins);
  bool pump_stream(SendStream* stream, bool begins);
  static ssize_t send_chunks(SendStream* stream, size_t* asked);
  void chunks_sent(SendStream* stream, size_t bytes);
  bool claim(SendStream* stream);
  void check_peer();
  void broke(const char* what, uint64_t message, size_t stream, int error);

  Fd control_;
  std::vector<std::unique_ptr<SendStream>> streams_;
  // NCCL's thread only: a ring of messages that wait for the control socket.
  Control control_queue_[kMaxRequests] = {};
  size_t control_head_ = 0;
  size_t control_count_ = 0;
  bool control_refused_ = false;  // the kernel had no room for these messages
  size_t held_bytes_ = 0;         // bytes of messages that began after the last send
  bool joined_ = false;           // a message was held back, and test() was not called since
  int64_t sent_ns_ = 0;           // when bytes were last sent
  SendHost* const host_;
  bool waits_ = false;                       // waits for room, as last told to the SendHost; NCCL's thread
  int64_t counted_ns_ = 0;                   // when the SendHost was last told; NCCL's thread
  std::atomic<int64_t> drained_ns_{0};       // when the kernel had taken all large messages; 0: already told
  int64_t checked_ns_ = 0;                   // when the peer's acknowledgements were last checked; NCCL's thread
  std::atomic<size_t> current_{0};           // the stream on which chunks begin
  std::atomic<int64_t> refused_ns_{0};       // when the kernel last had no room on a stream
  std::atomic<int64_t> behind_since_ns_{0};  // when it first had no room since everything was sent; 0: it has had room
  std::atomic<int64_t> round_trip_ns_{0};    // shortest round trip that TCP saw on that stream
  // Large messages that streams have not fully claimed, in order.
  Request* large_[kMaxRequests] GUARDED_BY(mutex_);
  size_t large_head_ GUARDED_BY(mutex_) = 0;
  size_t large_count_ GUARDED_BY(mutex_) = 0;
  uint64_t large_offset_ GUARDED_BY(mutex_) = 0;  // offset in the first of them
};

}  // namespace bagua::nccl_net
