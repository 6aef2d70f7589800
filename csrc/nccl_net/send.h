// The sending end of a connection.
#pragma once

#include <memory>
#include <vector>

#include "base/mutex.h"
#include "nccl_net/connection.h"
#include "nccl_net/wire.h"
#include "transport/stream_count.h"

namespace bagua::nccl_net {

// Whether the connections to one host go on to other data sockets, which only a trial can tell: where one fills the
// link, several compete, and the oldest message, which NCCL waits for, is late on one of them. All connections are
// tried and counted together: one that spreads by itself takes from the others on the link, and seems faster.
class SendHost {
 public:
  // That of a peer's "address:port". It stays until the process ends: what was found out is for later connections, too.
  static SendHost* of(const std::string& peer);
  bool spreads() const { return spreads_.load(std::memory_order_relaxed); }
  // The kernel took so many bytes.
  void sent(size_t bytes) { sent_.fetch_add(bytes, std::memory_order_relaxed); }
  // From `now` on so many more connections wait for room: -1, 0 or 1.
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
  // Takes connected, greeted, non-blocking sockets: control, then data. nullptr with the reason if the kernel refuses.
  static std::unique_ptr<SendConnection> open(std::vector<Socket> sockets, const std::string& peer, Status* status);
  ~SendConnection() override;

  // Begins to send; *request is nullptr if kMaxRequests are in flight.
  Result isend(void* data, size_t size, Request** request);
  bool pump() override;

 private:
  // A chunk on its way.
  struct Chunk {
    Request* request = nullptr;
    Header header;
    size_t header_left = 0;
    const char* data = nullptr;
    size_t left = 0;
  };
  static constexpr size_t kMostChunks = 8;  // that go with one call
  struct SendStream : Stream {
    // mutex: what it has claimed, in order, from `first` on.
    Chunk chunks[kMostChunks];
    size_t first = 0;
    size_t count = 0;
    uint64_t claimed = 0;              // their bytes
    uint64_t takes = 0;                // bytes that it claims: more while the kernel takes all at once
    std::atomic<bool> partial{false};  // a chunk has begun and waits for room
  };
  // Bytes for the control socket, in the order of messages.
  struct Control {
    Request* request;
    SmallHeader header;
    char zeros[kPaddedBytes - sizeof(SmallHeader)];  // go with the header
    size_t header_bytes;
    size_t sent;  // of header and payload
    size_t size;
  };

  SendConnection(std::vector<Socket> sockets, const std::string& peer);
  Status watch_for_helper() override { return Status::ok(); }  // from the beginning: only what waits for room costs
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

  Socket control_;
  std::vector<std::unique_ptr<SendStream>> streams_;
  // NCCL's thread: a ring of what waits for the control socket.
  Control control_queue_[kMaxRequests] = {};
  size_t control_head_ = 0;
  size_t control_count_ = 0;
  bool control_refused_ = false;  // the kernel had no room for them
  size_t held_bytes_ = 0;         // begun since bytes were last sent
  bool joined_ = false;           // a message was held back, and test() has not been called since
  int64_t sent_ns_ = 0;           // when bytes were last sent
  SendHost* const host_;
  bool waits_ = false;                       // for room, as the host was told; NCCL's thread
  int64_t counted_ns_ = 0;                   // when the host was last told something; NCCL's thread
  std::atomic<int64_t> drained_ns_{0};       // when the kernel had taken all large messages; 0: told
  int64_t checked_ns_ = 0;                   // when the peer's acknowledgements were last looked at; NCCL's thread
  std::atomic<size_t> current_{0};           // the stream on which chunks begin
  std::atomic<int64_t> refused_ns_{0};       // when the kernel last had no room on a stream
  std::atomic<int64_t> behind_since_ns_{0};  // when it first had none since all was sent; 0: it had
  std::atomic<int64_t> round_trip_ns_{0};    // the shortest that TCP saw on the stream that was refused then
  // Large messages that are not fully claimed by streams, in order.
  Request* large_[kMaxRequests] GUARDED_BY(mutex_);
  size_t large_head_ GUARDED_BY(mutex_) = 0;
  size_t large_count_ GUARDED_BY(mutex_) = 0;
  uint64_t large_offset_ GUARDED_BY(mutex_) = 0;  // of the first
};

}  // namespace bagua::nccl_net
