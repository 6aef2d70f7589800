// The receiving end of a connection.
#pragma once

#include <memory>
#include <vector>

#include "nccl_net/connection.h"
#include "nccl_net/wire.h"

namespace bagua::nccl_net {

class ReceiveConnection final : public Connection {
 public:
  // Takes accepted, greeted, non-blocking sockets: control, then data. nullptr with the reason if the kernel refuses.
  static std::unique_ptr<ReceiveConnection> open(std::vector<Socket> sockets, const std::string& peer, Status* status);
  ~ReceiveConnection() override;

  // Posts a buffer for the next message; *request is nullptr if kMaxRequests are in flight.
  Result irecv(void* data, size_t size, Request** request);
  bool pump() override;

 private:
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

  ReceiveConnection(std::vector<Socket> sockets, const std::string& peer);
  void progress() override;
  std::string hopeless(const Request& request) const override;

  void read_control();
  bool parse_control();
  bool begin_control_message(const Header& header);
  void take_staged();
  bool fill_control(bool* drained);
  bool pass(size_t budget);
  bool pump_stream(ReceiveStream* stream, size_t budget);
  bool begin_chunk(ReceiveStream* stream);
  void chunk_read(ReceiveStream* stream, size_t bytes);
  void stream_ended(ReceiveStream* stream, int error);
  size_t number(const ReceiveStream* stream) const;

  // The request of a message, with its size made known. kParked also sets stream->parked.
  Found find(const Header& header, ReceiveStream* stream, Request** out);
  Result wrong(const Header& header, const char* what);

  Socket control_;
  std::vector<std::unique_ptr<ReceiveStream>> streams_;
  std::atomic<size_t> first_{0};  // where the next pass over the streams begins
  // NCCL's thread: what was read from the control socket ahead of its use, and the small message that is being read.
  char staged_[kStagedBytes];
  size_t staged_begin_ = 0;
  size_t staged_end_ = 0;
  Request* small_ = nullptr;
  size_t small_left_ = 0;
  uint64_t next_control_ = 0;  // message whose header comes next
  bool control_ended_ = false;
};

}  // namespace bagua::nccl_net
