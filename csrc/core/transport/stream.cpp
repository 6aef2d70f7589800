#include "transport/stream.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "net/socket.h"
#include "transport/mesh_shared.h"

namespace bagua {

namespace {

constexpr const char* kNotAuthentic =
    "what came is not what it sent: bytes were changed, left out, repeated or moved on the way";

}  // namespace

void StreamWriter::protect(std::unique_ptr<Sealer> sealer) {
  sealer_ = std::move(sealer);
  staged_.reset(new char[sizeof header_ + Sealer::kTagBytes + kPiece + Sealer::kTagBytes]);
}

void StreamWriter::start(Outgoing message, uint64_t generation, uint32_t comm) {
  message_ = std::move(message);
  if (message_.type == FrameType::kControl) {
    message_.data = message_.text.data();
    message_.bytes = message_.text.size();
  }
  header_ = FrameHeader{};
  header_.type = message_.type;
  header_.generation = generation;
  header_.comm = comm;
  header_.payload_bytes = static_cast<uint32_t>(message_.bytes);
  header_.op = message_.op;
  header_.tag = message_.tag;
  header_.sequence = sequence_++;
  wire_bytes_ = sizeof header_ + message_.bytes;
  if (sealer_ == nullptr) {
    header_.payload_crc = crc32c(message_.data, message_.bytes);
    header_.header_crc = header_.compute_crc();
  } else {
    wire_bytes_ += Sealer::kTagBytes * (message_.bytes > 0 ? 2 : 1);
    sealed_ = staged_begin_ = staged_end_ = 0;
  }
  done_ = 0;
  busy_ = true;
}

// Makes one system call and returns as send(2) does.
ssize_t StreamWriter::write_some(int fd) {
  const size_t offset = done_ > sizeof header_ ? done_ - sizeof header_ : 0;
  iovec parts[2];
  size_t count = 0;
  if (done_ < sizeof header_) {
    parts[count++] = {reinterpret_cast<char*>(&header_) + done_, sizeof header_ - done_};
  }
  if (offset < message_.bytes) {
    char* payload = const_cast<char*>(static_cast<const char*>(message_.data));  // iovec has no const
    parts[count++] = {payload + offset, message_.bytes - offset};
  }
  return send_parts(fd, parts, count);
}

// Seals the next piece of the message. Returns false if libcrypto failed.
bool StreamWriter::stage() {
  char* at = staged_.get();
  if (staged_end_ == 0) {
    if (!sealer_->begin() || !sealer_->update(&header_, at, sizeof header_) || !sealer_->end(at + sizeof header_)) {
      return false;
    }
    at += sizeof header_ + Sealer::kTagBytes;
    if (message_.bytes > 0 && !sealer_->begin()) return false;
  }
  if (const size_t piece = std::min(message_.bytes - sealed_, kPiece); piece > 0) {
    if (!sealer_->update(static_cast<const char*>(message_.data) + sealed_, at, piece)) return false;
    at += piece;
    sealed_ += piece;
    if (sealed_ == message_.bytes) {
      if (!sealer_->end(at)) return false;
      at += Sealer::kTagBytes;
    }
  }
  staged_begin_ = 0;
  staged_end_ = static_cast<size_t>(at - staged_.get());
  return true;
}

// Like write_some(). If the kernel takes only a part of a piece, the rest waits.
ssize_t StreamWriter::write_sealed(int fd) {
  if (staged_begin_ == staged_end_ && !stage()) {
    errno = EIO;
    return -1;
  }
  const iovec part{staged_.get() + staged_begin_, staged_end_ - staged_begin_};
  const ssize_t put = send_parts(fd, &part, 1);
  if (put > 0) staged_begin_ += static_cast<size_t>(put);
  return put;
}

StreamWriter::Progress StreamWriter::flush(int fd, uint64_t* sent, int* error) {
  while (done_ < wire_bytes_) {
    const ssize_t put = sealer_ != nullptr ? write_sealed(fd) : write_some(fd);
    if (put < 0) {
      if (errno == EAGAIN) return Progress::kBlocked;
      *error = errno;
      return Progress::kBroken;
    }
    done_ += static_cast<size_t>(put);
    *sent += static_cast<uint64_t>(put);
  }
  busy_ = false;
  return Progress::kDone;
}

StreamReader::StreamReader() : ahead_(new char[kAhead]) {}

StreamReader::Step StreamReader::advance(int fd, bool eager, int64_t* budget, uint64_t* received) {
  Step step = Step::kBlocked;
  for (;;) {
    switch (state_) {
      case State::kDecision:
        return Step::kHeader;
      case State::kHeader:
        if (end_ - begin_ >= header_bytes()) return parse_header() ? Step::kHeader : Step::kCorrupt;
        if (!read(fd, false, eager, budget, received, &step)) return step;
        break;
      case State::kPayload:
        if (left_ > 0 && begin_ < end_) take_from_ahead();
        if (left_ == 0 && end_ - begin_ >= tag_bytes()) return finish_payload();
        if (!read(fd, !skipping_ && left_ > 0, eager, budget, received, &step)) return step;
        break;
    }
  }
}

// Opens the header. If it is not authentic, none of its content can be trusted, not even for the error text.
bool StreamReader::open_header() {
  const char* const record = ahead_.get() + begin_;
  begin_ += header_bytes();
  if (opener_->begin() && opener_->update(record, &header_, sizeof header_) && opener_->end(record + sizeof header_)) {
    return true;
  }
  problem_ = kNotAuthentic;
  return false;
}

bool StreamReader::parse_header() {
  if (opener_ != nullptr) {
    if (!open_header()) return false;
  } else {
    std::memcpy(&header_, ahead_.get() + begin_, sizeof header_);
    begin_ += sizeof header_;
  }
  const bool checked = opener_ != nullptr || header_.header_crc == header_.compute_crc();
  const bool control = header_.type == FrameType::kControl;
  const bool sign = header_.type == FrameType::kPing || header_.type == FrameType::kPong;
  if (header_.magic != FrameHeader::kMagic || !checked) {
    problem_ = "a frame header is damaged";
  } else if (header_.header_bytes != sizeof header_) {
    problem_ = "a frame header claims " + std::to_string(header_.header_bytes) + " bytes";
  } else if (!control && !sign && header_.type != FrameType::kData) {
    problem_ = "a frame has the unknown type " + std::to_string(static_cast<int>(header_.type));
  } else if (header_.payload_bytes > (sign ? 0 : control ? mesh::kMaxControl : mesh::kMaxMessage)) {
    problem_ = "a frame claims " + std::to_string(header_.payload_bytes) + " bytes, more than is allowed";
  } else if (header_.sequence != sequence_) {
    problem_ =
        "frame " + std::to_string(sequence_) + " was due and frame " + std::to_string(header_.sequence) + " came";
  } else {
    ++sequence_;
    state_ = State::kDecision;
    return true;
  }
  return false;
}

void StreamReader::receive(void* data, uint64_t cookie) {
  target_ = static_cast<char*>(data);
  left_ = header_.payload_bytes;
  crc_ = 0;
  opens_ = opener_ == nullptr || left_ == 0 || opener_->begin();
  cookie_ = cookie;
  skipping_ = false;
  state_ = State::kPayload;
}

void StreamReader::receive_control() {
  control_.resize(header_.payload_bytes);
  receive(control_.data(), 0);
}

void StreamReader::skip() {
  receive(nullptr, 0);
  skipping_ = true;
}

StreamReader::Step StreamReader::finish_payload() {
  state_ = State::kHeader;
  if (tag_bytes() > 0) {
    const char* const tag = ahead_.get() + begin_;
    begin_ += tag_bytes();
    if (opens_ && opener_->end(tag)) return Step::kPayload;
    problem_ = kNotAuthentic;
    return Step::kCorrupt;
  }
  if (skipping_ || opener_ != nullptr || crc_ == header_.payload_crc) return Step::kPayload;
  problem_ = "the checksum of a message is wrong";
  return Step::kCorrupt;
}

size_t StreamReader::missing() const {
  switch (state_) {
    case State::kHeader:
      return header_bytes() - (end_ - begin_);
    case State::kPayload:
      return left_ + tag_bytes() - (end_ - begin_);
    case State::kDecision:
      break;
  }
  return 1;
}

// Puts the next bytes of the payload in place; `from` may be that place already.
void StreamReader::place(const char* from, size_t bytes) {
  if (opener_ != nullptr) {
    opens_ = opens_ && opener_->update(from, target_, bytes);
  } else {
    if (from != target_) std::memcpy(target_, from, bytes);
    crc_ = crc32c(target_, bytes, crc_);
  }
  target_ += bytes;
}

void StreamReader::take_from_ahead() {
  const size_t take = std::min(left_, end_ - begin_);
  if (!skipping_) place(ahead_.get() + begin_, take);
  begin_ += take;
  left_ -= take;
}

bool StreamReader::read(int fd, bool direct, bool eager, int64_t* budget, uint64_t* received, Step* step) {
  if (eager) drained_ = false;
  *step = drained_ ? Step::kBlocked : Step::kYield;
  if (drained_ || *budget <= 0) return false;
  if (begin_ != 0) {
    std::memmove(ahead_.get(), ahead_.get() + begin_, end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
  }
  const size_t straight = direct ? std::min(left_, kDirectRead) : 0;
  const size_t room = !direct || straight == left_ ? kAhead - end_ : 0;
  iovec parts[2];
  size_t count = 0;
  if (straight > 0) parts[count++] = {target_, straight};
  if (room > 0) parts[count++] = {ahead_.get() + end_, room};
  const ssize_t got = receive_parts(fd, parts, count);
  if (got <= 0) {
    error_ = errno;
    *step = got == 0 ? Step::kClosed : error_ == EAGAIN ? Step::kBlocked : Step::kBroken;
    return false;
  }
  drained_ = !eager && static_cast<size_t>(got) < straight + room;
  *budget -= got;
  *received += static_cast<uint64_t>(got);
  const size_t placed = std::min(static_cast<size_t>(got), straight);
  if (placed > 0) place(target_, placed);
  left_ -= placed;
  end_ += static_cast<size_t>(got) - placed;
  return true;
}

}  // namespace bagua
