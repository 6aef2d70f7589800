#include "nccl_net/receive.h"

#include <poll.h>
#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>

#include "base/clock.h"
#include "base/text.h"
#include "nccl_net/ordered_copy.h"
#include "nccl_net/settings.h"

namespace bagua::nccl_net {
namespace {

// For this time only the socket that last had bytes is tried; then the kernel is asked about all sockets.
constexpr int64_t kGuessNs = 2'000;

}  // namespace

ReceiveConnection::ReceiveConnection(std::vector<Fd> sockets, const std::string& peer)
    : Connection("receive from", peer), control_(std::move(sockets.front())) {
  for (size_t i = 1; i < sockets.size(); ++i) {
    streams_.push_back(std::make_unique<ReceiveStream>());
    add_stream(streams_.back().get(), std::move(sockets[i]));
  }
}

ReceiveConnection::~ReceiveConnection() {
  close();
}

Result ReceiveConnection::irecv(void* data, size_t size, Request** request) {
  *request = nullptr;
  if (failure() != kSuccess) return failure();
  bool unparked = false;
  {
    const Lock lock(mutex_);
    Request* slot = take_slot(data, size);
    if (slot == nullptr) return kSuccess;
    slot->message = next_message_++;
    slot->left.store(Request::kUnknown, std::memory_order_relaxed);
    slot->used = true;
    for (const auto& stream : streams_) {
      if (!stream->parked.exchange(false, std::memory_order_relaxed)) continue;
      stream->ready.store(true, std::memory_order_release);
      unparked = true;
    }
    *request = slot;
  }
  control_parked_ = false;
  if (unparked) call_helper();
  return kSuccess;
}

// NCCL polls by calling test(). If no socket is known to be ready, this tries the socket that last had bytes, which
// saves the system call that asks first. Soon afterwards it asks about the other sockets, too.
void ReceiveConnection::progress() {
  if (!advance()) {
    favour_last();
    const int64_t now = advance() ? 0 : now_ns();
    if (now - asked_ns_ > kGuessNs) {
      asked_ns_ = now;
      if (ask_kernel()) advance();
    }
  }
  if (large_begun_.load(std::memory_order_relaxed) && large_begun_.exchange(false, std::memory_order_relaxed)) {
    call_helper();
  }
}

Status ReceiveConnection::watch_for_helper() {
  return watch(control_, EPOLLIN, EPOLLIN);
}

// Finds readable sockets. Returns true if there is one. Without helpers it uses poll(): for sockets in epoll the kernel
// does more work per packet, and on loopback the sender does that work.
bool ReceiveConnection::ask_kernel() {
  if (watched()) return look();
  pollfd items[kMaxStreams + 1];
  std::atomic<bool>* flags[kMaxStreams + 1];
  nfds_t count = 0;
  const auto add = [&](int fd, std::atomic<bool>* ready) {
    items[count] = {fd, POLLIN, 0};
    flags[count++] = ready;
  };
  if (!control_parked_ && !control_ended_) add(control_.get(), &control_ready_);
  for (const auto& stream : streams_) {
    if (!stream->parked.load(std::memory_order_relaxed) && !stream->ended.load(std::memory_order_relaxed)) {
      add(stream->socket.get(), &stream->ready);
    }
  }
  const int found = ::poll(items, count, 0);
  for (nfds_t i = 0; found > 0 && i < count; ++i) {
    if (items[i].revents != 0) flags[i]->store(true, std::memory_order_release);
  }
  return found > 0;
}

// Reads from sockets that are known to be ready. True if bytes were read.
bool ReceiveConnection::advance() {
  const bool small = control_ready_.load(std::memory_order_acquire) && !control_parked_ && read_control();
  return pass(settings().chunk_bytes) || small;
}

void ReceiveConnection::favour_last() {
  const size_t last = last_.load(std::memory_order_relaxed);
  (last == 0 ? control_ready_ : streams_[last - 1]->ready).store(true, std::memory_order_release);
}

bool ReceiveConnection::pump() {
  if (!wants_help()) return false;
  return pass(settings().chunk_bytes) || (look() && pass(settings().chunk_bytes));
}

// The request can't complete if the peer is lost, and each socket has ended or continues with later messages.
std::string ReceiveConnection::hopeless(const Request& request) const {
  if (!control_ended_ && !control_parked_) return "";
  if (&request == small_) return "the peer closed the connection in the middle of it";
  const bool over = std::all_of(streams_.begin(), streams_.end(), [](const auto& stream) {
    return stream->ended.load(std::memory_order_acquire) || stream->parked.load(std::memory_order_acquire);
  });
  // A helper may have read the last bytes of the message just before the sockets ended.
  if (!over || request.complete()) return "";
  return "the peer closed the connection before all of it had come";
}

// Reads the control socket. True if bytes were read.
bool ReceiveConnection::read_control() {
  bool any = false;
  bool drained = false;  // the last read was short, so there are no more bytes
  // Cleared before the read, so that an event during the read is not lost.
  control_ready_.store(false, std::memory_order_release);
  while (failure() == kSuccess) {
    if (small_ != nullptr && staged_begin_ < staged_end_) take_staged();
    if (small_ == nullptr && parse_control()) continue;
    if (control_parked_) {
      control_ready_.store(true, std::memory_order_release);
      break;
    }
    if (failure() != kSuccess || drained || !fill_control(&drained)) break;
    any = true;
  }
  if (any) last_.store(0, std::memory_order_relaxed);
  return any;
}

// Parses one header from the staged bytes. False: it is incomplete or wrong, or its message has no buffer.
bool ReceiveConnection::parse_control() {
  SmallHeader header;
  if (staged_end_ - staged_begin_ < sizeof header) return false;
  std::memcpy(&header, staged_ + staged_begin_, sizeof header);
  const uint32_t total = header.mark & SmallHeader::kMostBytes;
  const uint32_t ahead = header.message - static_cast<uint32_t>(next_control_);
  if (header.mark - total != SmallHeader::kMark || ahead > INT32_MAX) {
    wrong({header.mark, 0, header.message, 0, total}, "the header on the control socket is none");
    return false;
  }
  if (staged_end_ - staged_begin_ < small_header_bytes(total)) return false;
  if (!begin_small({Header::kSmall, 0, next_control_ + ahead, 0, total})) return false;
  staged_begin_ += small_header_bytes(total);
  return true;
}

bool ReceiveConnection::begin_small(const Header& header) {
  Request* request = nullptr;
  const Found found = find(header, nullptr, &request);
  control_parked_ = found == Found::kParked;
  if (found != Found::kBuffer) return false;
  next_control_ = header.message + 1;
  last_total_ = header.total;
  if (header.total > 0) {
    small_ = request;
    small_left_ = header.total;
  }
  inline_bytes_ += header.total;
  return true;
}

// Copies staged bytes to the small message that is being received.
void ReceiveConnection::take_staged() {
  const size_t part = std::min(small_left_, staged_end_ - staged_begin_);
  copy_in_order(small_->data + (small_->total - small_left_), staged_ + staged_begin_, part);
  staged_begin_ += part;
  small_left_ -= part;
  Request* request = small_;
  if (small_left_ == 0) small_ = nullptr;
  request->finish(static_cast<int64_t>(part));
}

// Reads from the control socket: the rest of a small message into its buffer, further bytes into the stage. False if
// nothing was read.
bool ReceiveConnection::fill_control(bool* drained) {
  if (control_ended_) return false;
  if (staged_begin_ > 0) {  // at most an incomplete header is left
    std::memmove(staged_, staged_ + staged_begin_, staged_end_ - staged_begin_);
    staged_end_ -= staged_begin_;
    staged_begin_ = 0;
  }
  iovec parts[2];
  size_t count = 0;
  if (small_ != nullptr) parts[count++] = {small_->data + (small_->total - small_left_), small_left_};
  const size_t most = last_total_ < kPaddedFrom ? kStagedBytes : kPaddedBytes;
  parts[count++] = {staged_ + staged_end_, most - staged_end_};
  const size_t room = most - staged_end_ + (small_ != nullptr ? small_left_ : 0);
  const ssize_t got = receive_parts(control_.get(), parts, count);
  if (got < 0) {
    if (errno != EAGAIN) {
      fail(kRemoteError, "message " + std::to_string(small_ != nullptr ? small_->message : next_control_) +
                             " can't be read from the control socket: the connection broke: " + errno_text(errno));
    }
    return false;
  }
  if (got == 0) {
    control_ended_ = true;
    return false;
  }
  auto bytes = static_cast<size_t>(got);
  *drained = bytes < room && !control_hung_up();  // the end of the stream may follow
  if (small_ != nullptr) {
    const size_t part = std::min(bytes, small_left_);
    small_left_ -= part;
    bytes -= part;
    Request* request = small_;
    if (small_left_ == 0) small_ = nullptr;
    request->finish(static_cast<int64_t>(part));
  }
  staged_end_ += bytes;
  return true;
}

// Goes once over the streams that no other thread uses; each moves about `budget` bytes.
bool ReceiveConnection::pass(size_t budget) {
  const size_t count = streams_.size();
  const size_t first = first_.fetch_add(1, std::memory_order_relaxed);
  bool moved = false;
  for (size_t i = 0; i < count; ++i) {
    ReceiveStream* stream = streams_[(first + i) % count].get();
    if (!stream->ready.load(std::memory_order_acquire)) continue;
    if (!stream->mutex.try_lock()) continue;
    const Lock lock(stream->mutex, std::adopt_lock);
    moved = pump_stream(stream, budget) || moved;
  }
  return moved;
}

bool ReceiveConnection::pump_stream(ReceiveStream* stream, size_t budget) {
  size_t moved = 0;
  // Cleared before the read, so that an event during the read is not lost.
  stream->ready.store(false, std::memory_order_release);
  while (moved < budget && failure() == kSuccess) {
    if (stream->request == nullptr && stream->header_got == sizeof(Header) && !begin_chunk(stream)) return moved > 0;
    iovec parts[2];
    size_t count = 0;
    if (stream->request != nullptr) parts[count++] = {stream->data, stream->left};
    parts[count++] = {reinterpret_cast<char*>(&stream->header) + stream->header_got,
                      sizeof(Header) - stream->header_got};
    const size_t room = (stream->request != nullptr ? stream->left : 0) + sizeof(Header) - stream->header_got;
    const ssize_t got = receive_parts(stream->socket.get(), parts, count);
    if (got <= 0) {
      if (got < 0 && errno == EAGAIN) {
        stream->stalls.fetch_add(1, std::memory_order_relaxed);
      } else {
        stream_ended(stream, got < 0 ? errno : 0);
      }
      return moved > 0;
    }
    moved += static_cast<size_t>(got);
    last_.store(stream->number, std::memory_order_relaxed);
    chunk_read(stream, static_cast<size_t>(got));
    // A short read: epoll will report more bytes. The end of the stream may follow.
    if (static_cast<size_t>(got) < room && !stream->hung_up.load(std::memory_order_acquire)) return true;
  }
  stream->ready.store(true, std::memory_order_release);
  return moved > 0;
}

// Evaluates a complete header. False if its message has no buffer yet, or after an error.
bool ReceiveConnection::begin_chunk(ReceiveStream* stream) {
  const Header& header = stream->header;
  if (header.kind != Header::kChunk || header.length == 0 || header.length > header.total ||
      header.offset > header.total - header.length) {
    wrong(header, "the header of a chunk is none");
    return false;
  }
  Request* request = nullptr;
  if (find(header, stream, &request) != Found::kBuffer) return false;
  stream->request = request;
  stream->data = request->data + header.offset;
  stream->left = header.length;
  stream->header_got = 0;
  return true;
}

void ReceiveConnection::chunk_read(ReceiveStream* stream, size_t bytes) {
  const size_t payload = std::min(bytes, stream->request != nullptr ? stream->left : 0);
  stream->header_got += bytes - payload;
  if (stream->request == nullptr) return;
  stream->data += payload;
  stream->left -= payload;
  stream->bytes.fetch_add(payload, std::memory_order_relaxed);
  outstanding_.fetch_sub(static_cast<int64_t>(payload), std::memory_order_relaxed);
  Request* request = stream->request;
  if (stream->left == 0) stream->request = nullptr;
  request->finish(static_cast<int64_t>(payload));
}

void ReceiveConnection::stream_ended(ReceiveStream* stream, int error) {
  const bool between = stream->request == nullptr && stream->header_got == 0;
  if (error == 0 && between) {
    stream->ended.store(true, std::memory_order_release);
    return;
  }
  const uint64_t message = stream->request != nullptr ? stream->request->message : stream->header.message;
  fail(kRemoteError, (between ? std::string("nothing") : "message " + std::to_string(message)) +
                         " can be read from data socket " + std::to_string(stream->number) + ": " +
                         (error == 0 ? "the peer closed the connection in the middle of a chunk"
                                     : "the connection broke: " + errno_text(error)));
}

ReceiveConnection::Found ReceiveConnection::find(const Header& header, ReceiveStream* stream, Request** out) {
  const Lock lock(mutex_);
  if (header.message >= next_message_) {
    if (stream != nullptr) stream->parked.store(true, std::memory_order_release);
    return Found::kParked;
  }
  Request* const found = slot_of(header.message);
  if (found == nullptr || found->complete()) {
    wrong(header, "bytes come for a message that is complete");
    return Found::kWrong;
  }
  if (header.total > found->capacity) {
    wrong(header, "the message is larger than the buffer for it");
    return Found::kWrong;
  }
  if (!found->sized) {
    found->sized = true;
    found->total = header.total;
    if (header.kind != Header::kSmall) {
      outstanding_.fetch_add(static_cast<int64_t>(header.total), std::memory_order_relaxed);
      large_begun_.store(true, std::memory_order_relaxed);
    }
    found->left.fetch_sub(Request::kUnknown - static_cast<int64_t>(header.total), std::memory_order_acq_rel);
  } else if (header.total != found->total) {
    wrong(header, "its size changed");
    return Found::kWrong;
  }
  const uint64_t begins = header.kind == Header::kChunk ? header.length : header.total;
  if (begins > found->total - found->begun) {
    wrong(header, "more bytes come than belong to it");
    return Found::kWrong;
  }
  found->begun += begins;
  *out = found;
  return Found::kBuffer;
}

Result ReceiveConnection::wrong(const Header& header, const char* what) {
  char numbers[160];
  std::snprintf(numbers, sizeof numbers, " (kind %08x, message %llu, offset %llu, length %u, total %llu)", header.kind,
                static_cast<unsigned long long>(header.message), static_cast<unsigned long long>(header.offset),
                header.length, static_cast<unsigned long long>(header.total));
  // A message that is too large is an error of the program. Other errors mean that the peer is not this plugin.
  return fail(kInternalError, std::string(what) + numbers);
}

}  // namespace bagua::nccl_net
