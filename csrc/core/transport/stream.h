// The two directions of one TCP stream, as state machines over non-blocking system calls. Internal to the mesh: not
// thread-safe, driven by the communicator's thread. They own neither the descriptor nor the payloads.
//
// On a plain connection a frame is a header and a payload with checksums. On an encrypted one, header and payload are a
// record each (seal.h): sealed bytes and a tag. An empty payload has no record.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "transport/frame.h"
#include "transport/seal.h"

namespace bagua {

// A message on its way out: queued at its peer, then held by one writer until its last byte is in the socket.
struct Outgoing {
  FrameType type = FrameType::kData;
  uint64_t op = 0;
  uint64_t tag = 0;
  const void* data = nullptr;  // kData: the caller's
  size_t bytes = 0;
  uint64_t cookie = 0;
  int64_t since_ns = 0;
  std::string text;  // kControl: the payload
};

class StreamWriter {
 public:
  enum class Progress : uint8_t { kDone, kBlocked, kBroken };

  // Encrypts the stream; call it before the first frame.
  void protect(std::unique_ptr<Sealer> sealer);
  bool busy() const { return busy_; }
  const Outgoing& current() const { return message_; }
  size_t rest() const { return busy_ ? wire_bytes_ - done_ : 0; }  // bytes still to be written
  // Takes a message. Must not be busy.
  void start(Outgoing message, uint64_t generation, uint32_t comm);
  // Writes until the message is out or the socket is full. Adds to `sent`. kBroken: `error` is the errno value.
  Progress flush(int fd, uint64_t* sent, int* error);

 private:
  bool busy_ = false;
  uint64_t sequence_ = 0;
  FrameHeader header_;
  Outgoing message_;
  size_t wire_bytes_ = 0;  // of the message, as it travels
  size_t done_ = 0;        // of these, those that the socket took

  // On an encrypted connection:
  static constexpr size_t kPiece = 128 << 10;  // sealed at once: the kernel copies it while it is in the cache
  std::unique_ptr<Sealer> sealer_;
  std::unique_ptr<char[]> staged_;
  size_t staged_begin_ = 0;  // staged_[begin, end) is sealed and not sent
  size_t staged_end_ = 0;    // 0: nothing of this message is sealed
  size_t sealed_ = 0;        // bytes of the payload

  ssize_t write_some(int fd);
  ssize_t write_sealed(int fd);
  bool stage();
};

class StreamReader {
 public:
  enum class Step : uint8_t {
    kBlocked,  // the socket is empty for now
    kYield,    // the budget is used up; there may be more
    kHeader,   // header() is valid: call receive() or skip(), now or later (a parked frame)
    kPayload,  // a payload is complete and valid: received() tells which
    kClosed,   // the peer has closed; mid_frame() tells whether inside a frame
    kBroken,   // the connection failed: error() is an errno value
    kCorrupt,  // the peer has sent an invalid frame: problem() describes it
  };

  StreamReader();
  // Decrypts the stream; call it before the first frame.
  void protect(std::unique_ptr<Opener> opener) { opener_ = std::move(opener); }
  // To be called when epoll has reported the socket: it may have bytes again.
  void readable() { drained_ = false; }
  // Reads on until there is something to report. A short read normally counts as "the socket is empty": the result is
  // then kBlocked until readable() is called. `eager`: read until the system call itself says that the socket is empty.
  Step advance(int fd, bool eager, int64_t* budget, uint64_t* received);

  const FrameHeader& header() const { return header_; }
  // Receives the payload of header() into `data`, which has header().payload_bytes bytes.
  void receive(void* data, uint64_t cookie);
  void receive_control();
  void skip();
  bool skipping() const { return skipping_; }
  bool mid_frame() const { return state_ != State::kHeader || begin_ != end_; }
  uint64_t cookie() const { return cookie_; }
  std::string& control() { return control_; }
  // The number of bytes needed for the next step; 1 if a frame waits for receive() or skip().
  size_t missing() const;
  int error() const { return error_; }
  const std::string& problem() const { return problem_; }

 private:
  enum class State : uint8_t { kHeader, kDecision, kPayload };
  static constexpr size_t kAhead = 16 << 10;  // for headers and small frames, to save system calls
  static constexpr size_t kDirectRead = 256
                                        << 10;  // per read: the checksum is computed while the bytes are in the cache

  size_t header_bytes() const { return sizeof header_ + (opener_ ? Opener::kTagBytes : 0); }
  // Length of the tag after the payload.
  size_t tag_bytes() const { return opener_ && !skipping_ && header_.payload_bytes > 0 ? Opener::kTagBytes : 0; }
  bool parse_header();
  bool open_header();
  void place(const char* from, size_t bytes);
  Step finish_payload();
  void take_from_ahead();
  // Makes one read call: ahead or, with `direct`, straight into the payload's memory. The last read of a payload also
  // takes following bytes ahead. False: nothing was read, and `step` tells why.
  bool read(int fd, bool direct, bool eager, int64_t* budget, uint64_t* received, Step* step);

  State state_ = State::kHeader;
  bool drained_ = false;  // the last read was short: the socket is empty until epoll says otherwise
  bool skipping_ = false;
  std::unique_ptr<char[]> ahead_;
  size_t begin_ = 0;  // ahead_[begin_, end_) is read and not used
  size_t end_ = 0;
  uint64_t sequence_ = 0;
  FrameHeader header_;
  char* target_ = nullptr;
  size_t left_ = 0;  // bytes of the payload still to come
  uint32_t crc_ = 0;
  std::unique_ptr<Opener> opener_;
  bool opens_ = true;  // libcrypto has taken all pieces of the present record
  uint64_t cookie_ = 0;
  std::string control_;
  int error_ = 0;
  std::string problem_;
};

}  // namespace bagua
