// The receiving end of a connection.
#pragma once

#include <memory>
#include <vector>

#include "nccl_net/connection.h"
#include "nccl_net/wire.h"

namespace bagua::nccl_net {

class ReceiveConnection final : public Connection {
 public:
  // Takes accepted, greeted, non-blocking sockets: control, then data.
  ReceiveConnection(std::vector<Socket> sockets, const std::string& peer);
  ~ReceiveConnection() override;

  // Posts a buffer for the next message; *request is nullptr if kMaxRequests are in flight.
  Result irecv(void* data, size_t size, Request** request);
  bool pump() override;

 private:
  // Messages of less than kPaddedFrom bytes are staged, several at once; what is larger is read to its place.
  static constexpr size_t kStagedBytes = 16 << 10;

  struct ReceiveStream : Stream {
    // mutex
    Header header;
    size_t header_got = 0;
    Request* request = nullptr;  // of the chunk that is being read
    char* data = nullptr;
    size_t left = 0;
    // A whole header of a message that has no buffer yet; set under mutex_.
    std::atomic<bool> parked{false};
    std::atomic<bool> ended{false};  // the peer closed it between two chunks
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

  // The request of a message, with its size made known. kParked also sets stream->parked.
  Found find(const Header& header, ReceiveStream* stream, Request** out);
  Result wrong(const Header& header, const char* what);

  Socket control_;
  std::vector<std::unique_ptr<ReceiveStream>> streams_;
  std::atomic<size_t> first_{0};  // where the next pass over the streams begins
  std::atomic<size_t> last_{0};   // the socket that bytes last came on: 0 control, else a data socket
  int64_t asked_ns_ = 0;          // when the kernel was last asked which sockets have bytes; NCCL's thread
  // Bytes of a large message began to come: a helper may be called.
  std::atomic<bool> large_begun_{false};
  // NCCL's thread: what was read from the control socket ahead of its use, and the small message that is being read.
  char staged_[kStagedBytes];
  size_t staged_begin_ = 0;
  size_t staged_end_ = 0;
  Request* small_ = nullptr;
  size_t small_left_ = 0;
  uint64_t last_total_ = 0;      // bytes of the small message that came last
  uint64_t next_control_ = 0;    // no earlier message comes on the control socket
  bool control_parked_ = false;  // a whole header of a message that has no buffer yet is staged
  bool control_ended_ = false;
};

}  // namespace bagua::nccl_net
