#include "nccl_net/send.h"

#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <map>

#include "base/clock.h"
#include "base/text.h"
#include "nccl_net/settings.h"

namespace bagua::nccl_net {
namespace {

constexpr size_t kTurnBytes = 1 << 20;     // that a stream moves before it is another stream's turn
constexpr uint64_t kLargeChunk = 1 << 20;  // for a stream that takes everything at once
// A message that follows others within this time is probably one of several. It is held back so that the next ones can
// join it, for at most this time and number of bytes.
constexpr int64_t kTogetherNs = 2'000;
constexpr size_t kTogetherBytes = 512 << 10;
constexpr int64_t kPatienceNs = 50'000;  // how long to wait for a stream without room before another one is used

}  // namespace

SendHost* SendHost::of(const std::string& peer) {
  static Mutex mutex;
  static auto* const hosts = new std::map<std::string, SendHost>;
  const Lock lock(mutex);
  return &(*hosts)[peer.substr(0, peer.rfind(':'))];
}

void SendHost::tell(int64_t now, int change) {
  const Lock lock(mutex_);
  told_ns_ = std::max(told_ns_, now);  // another connection may have reported a later time
  waiting_ += change;
  count_.update(told_ns_, sent_.load(std::memory_order_relaxed), 0, waiting_ > 0);
  spreads_.store(count_.all(), std::memory_order_relaxed);
}

SendConnection::SendConnection(std::vector<Fd> sockets, const std::string& peer)
    : Connection("send to", peer), control_(std::move(sockets.front())), host_(SendHost::of(peer)) {
  for (size_t i = 1; i < sockets.size(); ++i) {
    streams_.push_back(std::make_unique<SendStream>());
    add_stream(streams_.back().get(), std::move(sockets[i]));
    streams_.back()->takes = settings().chunk_bytes;
  }
}

std::unique_ptr<SendConnection> SendConnection::open(std::vector<Fd> sockets, const std::string& peer, Status* status) {
  std::unique_ptr<SendConnection> out(new SendConnection(std::move(sockets), peer));
  *status = out->watch(out->control_, 0, EPOLLOUT);
  if (!*status) out.reset();
  return out;
}

SendConnection::~SendConnection() {
  close();
  stop_waiting();
}

Result SendConnection::isend(void* data, size_t size, Request** request) {
  *request = nullptr;
  if (failure() != kSuccess) {
    stop_waiting();
    return failure();
  }
  const bool small = size <= settings().inline_bytes;
  Request* slot = nullptr;
  {
    const Lock lock(mutex_);
    slot = take_slot(data, size);
    if (slot == nullptr) return kSuccess;
    slot->used = true;
    slot->message = next_message_++;
    slot->total = size;
    slot->left.store(static_cast<int64_t>(size) + (small ? 1 : 0), std::memory_order_relaxed);
    if (!small) large_[(large_head_ + large_count_++) % kMaxRequests] = slot;
  }
  if (small) {
    queue_small(slot, size);
  } else {
    if (outstanding_.fetch_add(static_cast<int64_t>(size), std::memory_order_relaxed) == 0) {
      behind_since_ns_.store(0, std::memory_order_relaxed);
    }
    call_helper();
  }
  held_bytes_ += size;
  joined_ = holds();
  if (!joined_) flush(false);
  *request = slot;
  return kSuccess;
}

void SendConnection::queue_small(Request* request, size_t size) {
  Control& entry = control_queue_[(control_head_ + control_count_++) % kMaxRequests];
  entry.request = request;
  entry.header = {SmallHeader::kMark | static_cast<uint32_t>(size), static_cast<uint32_t>(request->message)};
  entry.header_bytes = small_header_bytes(size);
  entry.sent = 0;
  entry.size = entry.header_bytes + size;
  inline_bytes_ += size;
}

// True while messages wait for more messages, because one system call can send many. NCCL begins all that it has one
// after the other, so the second call of test() without a new message ends the wait.
bool SendConnection::holds() const {
  return held_bytes_ < kTogetherBytes && !control_refused_ && control_count_ < kMaxRequests &&
         now_ns() - sent_ns_ < kTogetherNs;
}

void SendConnection::progress() {
  const bool joined = joined_;
  joined_ = false;
  if ((joined && holds()) || flush(true)) return;
  check_peer();
}

// Sends as much as possible. `again`: also tries sockets that had no room before. True if bytes of large messages
// moved.
bool SendConnection::flush(bool again) {
  if (control_count_ > 0 && (again || !control_refused_)) flush_control();
  const bool moved = outstanding_.load(std::memory_order_relaxed) > 0 && (again ? turn() : pass(false));
  held_bytes_ = 0;
  sent_ns_ = now_ns();
  count_streams(sent_ns_);
  return moved;
}

// Tells the SendHost whether large messages wait for room.
void SendConnection::count_streams(int64_t now) {
  const size_t current = current_.load(std::memory_order_relaxed);
  const bool waits =
      outstanding_.load(std::memory_order_relaxed) > 0 && !streams_[current]->ready.load(std::memory_order_relaxed);
  const int64_t drained = drained_ns_.exchange(0, std::memory_order_relaxed);
  if (drained > counted_ns_ && waits_) {  // a helper may have sent the last bytes long ago
    host_->tell(std::min(drained, now), -1);
    waits_ = false;
  }
  if (waits == waits_ && now - counted_ns_ < StreamCount::kLookNs) return;
  host_->tell(now, static_cast<int>(waits) - static_cast<int>(waits_));
  waits_ = waits;
  counted_ns_ = now;
}

// Called when a connection ends: otherwise its SendHost would count later time as waiting, too.
void SendConnection::stop_waiting() {
  if (waits_) host_->tell(now_ns(), -1);
  waits_ = false;
}

bool SendConnection::pump() {
  if (!wants_help()) return false;
  return turn();
}

std::string SendConnection::hopeless(const Request&) const {
  const bool gone = control_hung_up() || std::any_of(streams_.begin(), streams_.end(), [](const auto& stream) {
                      return stream->hung_up.load(std::memory_order_relaxed);
                    });
  return gone ? "the peer closed the connection" : "";
}

// Finds a vanished host, for which TCP itself would try for a quarter of an hour. A living peer that takes no bytes
// still acknowledges window probes, so the connection waits for it.
void SendConnection::check_peer() {
  const int64_t now = now_ns();
  const int64_t limit_s = settings().peer_timeout_s;
  if (limit_s == 0 || now - checked_ns_ < kNsPerS) return;
  checked_ns_ = now;
  for (size_t i = 0; i <= streams_.size(); ++i) {
    const int64_t silent_ns = unacknowledged_ns((i == 0 ? control_ : streams_[i - 1]->socket).get());
    if (silent_ns < limit_s * kNsPerS) continue;
    fail(kRemoteError,
         "the host has acknowledged nothing for " + duration_text(silent_ns) + " (BAGUA_NET_PEER_TIMEOUT)");
    return;
  }
}

// Sends small messages of the queue, as many per call as fit, until the kernel takes no more.
void SendConnection::flush_control() {
  while (control_count_ > 0 && failure() == kSuccess) {
    iovec parts[2 * kMaxRequests];
    size_t count = 0;
    size_t asked = 0;
    for (size_t i = 0; i < control_count_; ++i) {
      Control& entry = control_queue_[(control_head_ + i) % kMaxRequests];
      size_t skip = entry.sent;
      asked += entry.size - skip;
      if (skip < entry.header_bytes) {
        parts[count++] = {reinterpret_cast<char*>(&entry.header) + skip, entry.header_bytes - skip};
        skip = entry.header_bytes;
      }
      if (skip < entry.size) parts[count++] = {entry.request->data + (skip - entry.header_bytes), entry.size - skip};
    }
    const ssize_t put = send_parts(control_.get(), parts, count);
    control_refused_ = put < static_cast<ssize_t>(asked);
    if (put < 0) {
      if (errno != EAGAIN) broke("", control_queue_[control_head_].request->message, 0, errno);
      return;
    }
    control_sent(static_cast<size_t>(put));
    if (control_refused_) return;
  }
}

void SendConnection::control_sent(size_t bytes) {
  while (bytes > 0) {
    Control& entry = control_queue_[control_head_];
    const size_t part = std::min(bytes, entry.size - entry.sent);
    entry.sent += part;
    bytes -= part;
    if (entry.sent < entry.size) return;
    const size_t payload = entry.size - entry.header_bytes;
    control_head_ = (control_head_ + 1) % kMaxRequests;
    --control_count_;
    entry.request->finish(static_cast<int64_t>(payload) + 1);
  }
}

// True if bytes were moved. If several sockets are faster than one, a stream that takes nothing for long is left for
// another one. But a new stream needs some round trips to reach its speed, so it stays if the rest is sent earlier.
bool SendConnection::turn() {
  if (pass(false) || (look() && pass(false))) return true;
  if (!host_->spreads()) return false;
  const int64_t now = now_ns();
  return now - refused_ns_.load(std::memory_order_relaxed) >= kPatienceNs &&
         now - behind_since_ns_.load(std::memory_order_relaxed) >= 2 * round_trip_ns_.load(std::memory_order_relaxed) &&
         pass(true);
}

// Continues chunks that have begun on all streams with room, and begins new chunks on the current stream only: one
// socket that takes everything costs less than several. `spread`: if it takes no more, the next stream becomes current.
bool SendConnection::pass(bool spread) {
  const size_t count = streams_.size();
  const size_t current = current_.load(std::memory_order_relaxed);
  bool moved = false;
  for (size_t i = 0; i < count; ++i) {
    SendStream* stream = streams_[i].get();
    if (i != current && stream->partial.load(std::memory_order_relaxed)) moved = serve(stream, false) || moved;
  }
  for (size_t i = 0; i < (spread ? count : 1); ++i) {
    const size_t at = (current + i) % count;
    if (!serve(streams_[at].get(), true)) continue;
    if (i > 0) current_.store(at, std::memory_order_relaxed);
    return true;
  }
  return moved;
}

// Moves bytes of a stream that has room and that no other thread uses. `begins`: also new chunks. True if bytes moved.
bool SendConnection::serve(SendStream* stream, bool begins) {
  if (!stream->ready.load(std::memory_order_acquire)) return false;
  if (!stream->mutex.try_lock()) return false;
  const Lock lock(stream->mutex, std::adopt_lock);
  return pump_stream(stream, begins);
}

bool SendConnection::pump_stream(SendStream* stream, bool begins) {
  size_t moved = 0;
  // Cleared before the call, so that an event during the call is not lost.
  stream->ready.store(false, std::memory_order_release);
  while (moved < kTurnBytes && failure() == kSuccess) {
    if (stream->count == 0 && begins) {
      while (claim(stream)) continue;
    }
    if (stream->count == 0) break;
    const bool fresh = stream->chunks[stream->first].header_left == sizeof(Header);
    size_t asked = 0;
    const ssize_t put = send_chunks(stream, &asked);
    if (put < 0) {
      if (errno == EAGAIN) {
        refused(stream);
      } else {
        broke(" (a chunk)", stream->chunks[stream->first].header.message, stream->number, errno);
      }
      return moved > 0;
    }
    moved += static_cast<size_t>(put);
    chunks_sent(stream, static_cast<size_t>(put));
    if (static_cast<size_t>(put) < asked) {  // no more room: epoll will report when there is
      refused(stream);
      return true;
    }
    if (fresh) {  // the kernel took all at once
      stream->takes = std::min<uint64_t>(2 * stream->takes, std::max<uint64_t>(kLargeChunk, settings().chunk_bytes));
    }
  }
  stream->partial.store(stream->count > 0, std::memory_order_relaxed);
  stream->ready.store(true, std::memory_order_release);
  return moved > 0;
}

// Sends all claimed chunks of the stream by one system call. *asked: their bytes with headers.
ssize_t SendConnection::send_chunks(SendStream* stream, size_t* asked) {
  iovec parts[2 * kMostChunks];
  size_t count = 0;
  *asked = 0;
  for (size_t i = 0; i < stream->count; ++i) {
    Chunk& chunk = stream->chunks[(stream->first + i) % kMostChunks];
    if (chunk.header_left > 0) {
      char* const end = reinterpret_cast<char*>(&chunk.header) + sizeof(Header);
      parts[count++] = {end - chunk.header_left, chunk.header_left};
    }
    parts[count++] = {const_cast<char*>(chunk.data), chunk.left};
    *asked += chunk.header_left + chunk.left;
  }
  return send_parts(stream->socket.get(), parts, count);
}

void SendConnection::refused(SendStream* stream) {
  stream->takes = std::max<uint64_t>(stream->takes / 2, settings().chunk_bytes);
  stream->partial.store(true, std::memory_order_relaxed);
  stream->stalls.fetch_add(1, std::memory_order_relaxed);
  const int64_t now = now_ns();
  refused_ns_.store(now, std::memory_order_relaxed);
  if (behind_since_ns_.load(std::memory_order_relaxed) != 0) return;
  behind_since_ns_.store(now, std::memory_order_relaxed);
  round_trip_ns_.store(std::max<int64_t>(shortest_round_trip_ns(stream->socket.get()), 0), std::memory_order_relaxed);
}

void SendConnection::chunks_sent(SendStream* stream, size_t bytes) {
  host_->sent(bytes);
  while (bytes > 0) {
    Chunk& chunk = stream->chunks[stream->first];
    const size_t header = std::min(bytes, chunk.header_left);
    const size_t payload = std::min(bytes - header, chunk.left);
    bytes -= header + payload;
    chunk.header_left -= header;
    chunk.data += payload;
    chunk.left -= payload;
    stream->claimed -= payload;
    stream->bytes.fetch_add(payload, std::memory_order_relaxed);
    if (outstanding_.fetch_sub(static_cast<int64_t>(payload), std::memory_order_relaxed) ==
        static_cast<int64_t>(payload)) {
      drained_ns_.store(now_ns(), std::memory_order_relaxed);
    }
    if (chunk.left == 0) {
      stream->first = (stream->first + 1) % kMostChunks;
      --stream->count;
    }
    chunk.request->finish(static_cast<int64_t>(payload));
  }
}

// Claims the next chunk for `stream`, from the first large message with bytes left. Together with other chunks it
// claims only the whole rest of a message. False if there is no message, or if the stream has claimed enough.
bool SendConnection::claim(SendStream* stream) {
  if (stream->count == kMostChunks) return false;
  const Lock lock(mutex_);
  if (large_count_ == 0) return false;
  Request* request = large_[large_head_];
  const uint64_t rest = request->capacity - large_offset_;
  if (stream->count > 0 && stream->claimed + rest > stream->takes) return false;
  uint64_t most = stream->takes;
  if (large_count_ == 1 && settings().threads > 0) {  // leaves a share for helpers
    const uint64_t share = rest / (static_cast<uint64_t>(settings().threads) + 1);
    most = std::min(most, std::max<uint64_t>(share, settings().chunk_bytes));
  }
  const uint64_t length = std::min(most, rest);
  Chunk& chunk = stream->chunks[(stream->first + stream->count++) % kMostChunks];
  chunk.request = request;
  chunk.header = {Header::kChunk, static_cast<uint32_t>(length), request->message, large_offset_, request->capacity};
  chunk.header_left = sizeof(Header);
  chunk.data = request->data + large_offset_;
  chunk.left = length;
  stream->claimed += length;
  large_offset_ += length;
  if (length == rest) {
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
