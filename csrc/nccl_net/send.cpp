#include "nccl_net/send.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>

#include "base/clock.h"
#include "base/text.h"
#include "nccl_net/settings.h"

namespace bagua::nccl_net {
namespace {

bool would_block(int error) {
  return error == EAGAIN || error == EWOULDBLOCK;
}

// sendmsg that begins anew after a signal; -1 with errno.
ssize_t send_parts(int fd, iovec* parts, size_t count) {
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = count;
  ssize_t put;
  do {
    put = ::sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (put < 0 && errno == EINTR);
  return put;
}

}  // namespace

SendConnection::SendConnection(std::vector<Socket> sockets, const std::string& peer)
    : Connection("send to", peer), control_(std::move(sockets.front())) {
  for (size_t i = 1; i < sockets.size(); ++i) {
    streams_.push_back(std::make_unique<SendStream>());
    streams_.back()->socket = std::move(sockets[i]);
  }
}

std::unique_ptr<SendConnection> SendConnection::open(std::vector<Socket> sockets, const std::string& peer,
                                                     Status* status) {
  std::unique_ptr<SendConnection> out(new SendConnection(std::move(sockets), peer));
  std::vector<Stream*> streams;
  for (const auto& stream : out->streams_) streams.push_back(stream.get());
  *status = out->watch(out->control_, streams);
  if (!*status) out.reset();
  return out;
}

SendConnection::~SendConnection() {
  close();
}

Result SendConnection::isend(void* data, size_t size, Request** request) {
  *request = nullptr;
  if (failure() != kSuccess) return failure();
  const bool small = size <= settings().inline_bytes;
  Request* slot = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    slot = take_slot(data, size);
    if (slot == nullptr) return kSuccess;
    slot->used = true;
    slot->message = next_message_++;
    slot->total = size;
    slot->left.store(static_cast<int64_t>(size) + 1, std::memory_order_relaxed);
    if (!small) large_[(large_head_ + large_count_++) % kMaxRequests] = slot;
  }
  Control& entry = control_queue_[(control_head_ + control_count_++) % kMaxRequests];
  entry.request = slot;
  entry.header = {small ? Header::kInline : Header::kAnnounce, 0, slot->message, 0, size};
  entry.sent = 0;
  entry.size = sizeof(Header) + (small ? size : 0);
  flush_control();
  if (small) {
    inline_bytes_ += size;
  } else {
    outstanding_.fetch_add(static_cast<int64_t>(size), std::memory_order_relaxed);
    call_helper();
    pass(settings().chunk_bytes);
  }
  *request = slot;
  return kSuccess;
}

void SendConnection::progress() {
  if (control_count_ > 0) flush_control();
  if (outstanding_.load(std::memory_order_relaxed) > 0) {
    if (pass(settings().chunk_bytes) || (look() && pass(settings().chunk_bytes))) return;
  }
  check_peer();
}

bool SendConnection::pump() {
  if (!wants_help()) return false;
  return pass(settings().chunk_bytes) || (look() && pass(settings().chunk_bytes));
}

std::string SendConnection::hopeless(const Request&) const {
  const bool gone = control_hung_up() || std::any_of(streams_.begin(), streams_.end(), [](const auto& stream) {
                      return stream->hung_up.load(std::memory_order_relaxed);
                    });
  return gone ? "the peer closed the connection" : "";
}

// A host that vanished without a word: TCP itself would try for a quarter of an hour. A peer that is alive but takes
// nothing acknowledges the probes of its closed window, and is waited for.
void SendConnection::check_peer() {
  const int64_t now = now_ns();
  const int64_t limit_s = settings().peer_timeout_s;
  if (limit_s == 0 || now - checked_ns_ < kNsPerS) return;
  checked_ns_ = now;
  for (size_t i = 0; i <= streams_.size(); ++i) {
    const int fd = i == 0 ? control_.fd() : streams_[i - 1]->socket.fd();
    tcp_info info{};
    socklen_t length = sizeof info;
    if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) continue;
    const int64_t silent_ms = info.tcpi_last_ack_recv;
    if (info.tcpi_unacked == 0 || info.tcpi_retransmits == 0 || silent_ms < limit_s * 1000) continue;
    fail(kRemoteError,
         "the host has acknowledged nothing for " + duration_text(silent_ms * kNsPerMs) + " (BAGUA_NET_PEER_TIMEOUT)");
    return;
  }
}

// Headers and small messages of the queue, as many as fit into one call, until the kernel takes no more.
void SendConnection::flush_control() {
  constexpr size_t kBatch = 8;
  while (control_count_ > 0 && failure() == kSuccess) {
    iovec parts[2 * kBatch];
    size_t count = 0;
    for (size_t i = 0; i < std::min(control_count_, kBatch); ++i) {
      Control& entry = control_queue_[(control_head_ + i) % kMaxRequests];
      size_t skip = entry.sent;
      if (skip < sizeof(Header)) {
        parts[count++] = {reinterpret_cast<char*>(&entry.header) + skip, sizeof(Header) - skip};
        skip = sizeof(Header);
      }
      if (skip < entry.size) parts[count++] = {entry.request->data + (skip - sizeof(Header)), entry.size - skip};
    }
    const ssize_t put = send_parts(control_.fd(), parts, count);
    if (put < 0) {
      if (!would_block(errno)) broke("", control_queue_[control_head_].request->message, 0, errno);
      return;
    }
    control_sent(static_cast<size_t>(put));
  }
}

void SendConnection::control_sent(size_t bytes) {
  while (bytes > 0) {
    Control& entry = control_queue_[control_head_];
    const size_t part = std::min(bytes, entry.size - entry.sent);
    entry.sent += part;
    bytes -= part;
    if (entry.sent < entry.size) return;
    control_head_ = (control_head_ + 1) % kMaxRequests;
    --control_count_;
    entry.request->finish(static_cast<int64_t>(entry.size - sizeof(Header)) + 1);
  }
}

// One turn over the streams that nobody else is at; each moves about `budget` bytes.
bool SendConnection::pass(size_t budget) {
  const size_t count = streams_.size();
  const size_t first = first_.fetch_add(1, std::memory_order_relaxed);
  bool moved = false;
  for (size_t i = 0; i < count; ++i) {
    SendStream* stream = streams_[(first + i) % count].get();
    if (!stream->ready.load(std::memory_order_acquire)) continue;
    const std::unique_lock<std::mutex> lock(stream->mutex, std::try_to_lock);
    if (lock.owns_lock()) moved = pump_stream(stream, budget) || moved;
  }
  return moved;
}

bool SendConnection::pump_stream(SendStream* stream, size_t budget) {
  size_t moved = 0;
  // First, so that an event that comes while the kernel says no is not lost.
  stream->ready.store(false, std::memory_order_release);
  while (moved < budget && failure() == kSuccess) {
    Chunk& chunk = stream->chunk;
    if (chunk.request == nullptr && !claim(&chunk)) break;
    iovec parts[2];
    size_t count = 0;
    if (chunk.header_left > 0) {
      parts[count++] = {reinterpret_cast<char*>(&chunk.header) + (sizeof(Header) - chunk.header_left),
                        chunk.header_left};
    }
    parts[count++] = {const_cast<char*>(chunk.data), chunk.left};
    const ssize_t put = send_parts(stream->socket.fd(), parts, count);
    if (put < 0) {
      if (would_block(errno)) {
        stream->stalls.fetch_add(1, std::memory_order_relaxed);
        return moved > 0;
      }
      const auto same = [&](const auto& item) { return item.get() == stream; };
      const auto at = std::find_if(streams_.begin(), streams_.end(), same) - streams_.begin();
      broke(" (a chunk)", chunk.header.message, static_cast<size_t>(at) + 1, errno);
      return moved > 0;
    }
    moved += static_cast<size_t>(put);
    chunk_sent(stream, static_cast<size_t>(put));
  }
  stream->ready.store(true, std::memory_order_release);
  return moved > 0;
}

void SendConnection::chunk_sent(SendStream* stream, size_t bytes) {
  Chunk& chunk = stream->chunk;
  const size_t header = std::min(bytes, chunk.header_left);
  chunk.header_left -= header;
  const size_t payload = bytes - header;
  chunk.data += payload;
  chunk.left -= payload;
  stream->bytes.fetch_add(payload, std::memory_order_relaxed);
  outstanding_.fetch_sub(static_cast<int64_t>(payload), std::memory_order_relaxed);
  Request* request = chunk.request;
  if (chunk.left == 0) chunk.request = nullptr;
  request->finish(static_cast<int64_t>(payload));
}

// Cuts the next chunk off the first large message that has one left.
bool SendConnection::claim(Chunk* chunk) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (large_count_ == 0) return false;
  Request* request = large_[large_head_];
  const uint64_t length = std::min<uint64_t>(settings().chunk_bytes, request->capacity - large_offset_);
  chunk->request = request;
  chunk->header = {Header::kChunk, static_cast<uint32_t>(length), request->message, large_offset_, request->capacity};
  chunk->header_left = sizeof(Header);
  chunk->data = request->data + large_offset_;
  chunk->left = length;
  large_offset_ += length;
  if (large_offset_ == request->capacity) {
    large_offset_ = 0;
    large_head_ = (large_head_ + 1) % kMaxRequests;
    --large_count_;
  }
  return true;
}

void SendConnection::broke(const char* what, uint64_t message, size_t stream, int error) {
  const std::string where = stream == 0 ? "the control socket" : "data socket " + std::to_string(stream);
  fail(kRemoteError, "message " + std::to_string(message) + what + " can't be sent on " + where +
                         ": the connection broke: " + errno_text(error));
}

}  // namespace bagua::nccl_net
