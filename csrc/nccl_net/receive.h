// The receiving end of a connection.
#pragma once

#include <memory>
#include <vector>

#include "nccl_net/connection.h"
#include "nccl_net/wire.h"

namespace bagua::nccl_net {

class ReceiveConnection final : public Connection {
 public:
  // `sockets` are non-blocking and have exchanged Hello and Answer: the control socket, then the data sockets.
  ReceiveConnection(std::vector<Fd> sockets, const std::string& peer);
  ~ReceiveConnection() override;

  // Posts a buffer for the next message. *request is nullptr if kMaxRequests requests are in flight.
  Result irecv(void* data, size_t size, Request** request);
  bool pump() override;

 private:
  // Messages of less than kPaddedFrom bytes are staged, several per read. Larger ones are read into their buffer.
  static constexpr size_t kStagedBytes = 16 << 10;

  struct ReceiveStream : Stream {
    // guarded by mutex:
    Header header;
    size_t header_got = 0;
    Request* request = nullptr;  // of the chunk that is being received
    char* data = nullptr;
    size_t left = 0;
    // A complete header waits, because its message has no buffer yet. Set under mutex_.
    std::atomic<bool> parked{false};
    std::atomic<bool> ended{false};  // the peer has closed it between two chunks
  };
  enum class Found { kBuffer, kParked, kWrong };

  Status watch_for_helper() override;
  void progress() override;
  std::string hopeless(const Request& request) const override;

  bool ask_kernel();
  bool advance();
  void favour_last();
  bool read_control();
  bool parse_control();
  bool begin_small(const Header& header);
  void take_staged();
  bool fill_control(bool* drained);
  bool pass(size_t budget);
  bool pump_stream(ReceiveStream* stream, size_t budget);
  bool begin_chunk(ReceiveStream* stream);
  void chunk_read(ReceiveStream* stream, size_t bytes);
  void stream_ended(ReceiveStream* stream, int error);

  // Finds the request of a message and sets its size. kParked also sets stream->parked.
  Found find(const Header& header, ReceiveStream* stream, Request** out);
  Result wrong(const Header& header, const char* what);

  Fd control_;
  std::vector<std::unique_ptr<ReceiveStream>> streams_;
  std::atomic<size_t> first_{0};  // the next pass over the streams begins here
  std::atomic<size_t> last_{0};   // the socket that last had bytes: 0 is the control socket
  int64_t asked_ns_ = 0;          // when the kernel was last asked which sockets are readable; NCCL's thread
  // A large message has begun to arrive, so a helper may be called.
  std::atomic<bool> large_begun_{false};
  // NCCL's thread only: bytes that were read ahead from the control socket, and the small message being received.
  char staged_[kStagedBytes];
  size_t staged_begin_ = 0;
  size_t staged_end_ = 0;
  Request* small_ = nullptr;
  size_t small_left_ = 0;
  uint64_t last_total_ = 0;      // size of the latest small message
  uint64_t next_control_ = 0;    // earlier messages do not come on the control socket any more
  bool control_parked_ = false;  // a complete header is staged, whose message has no buffer yet
  bool control_ended_ = false;
};

}  // namespace bagua::nccl_net
