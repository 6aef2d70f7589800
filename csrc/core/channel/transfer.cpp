#include "channel/transfer.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernel/reduce.h"

namespace bagua {

namespace {

// Inside a host the pieces of all ranks should lie in the last-level cache together, and a piece should be worth its
// wake-ups. Between hosts a piece should be worth a trip.
constexpr uint64_t kLocalPiece = 512 << 10, kRemotePiece = 4 << 20;  // bytes
constexpr uint64_t kLocalStaged = 4, kRemoteStaged = 3;              // pieces in flight through a stage
constexpr uint64_t kUnstaged = 256;                                  // and from shared memory
constexpr uint64_t kLeastRow = 64 << 10;                             // bytes of a piece, in each row
constexpr uint64_t kStreamingBytes = 8 << 20;

constexpr uint64_t line(uint64_t bytes) {
  return (bytes + 63) / 64 * 64;
}

// `streaming`: the result is too large for the caches.
void copy_rows(char* to, uint64_t to_row, const char* from, uint64_t from_row, uint64_t rows, uint64_t bytes,
               bool streaming) {
  for (uint64_t row = 0; row < rows; ++row, to += to_row, from += from_row) {
    if (streaming) {
      copy_streaming(to, from, bytes);
    } else {
      memcpy(to, from, bytes);
    }
  }
}

}  // namespace

Status StagePool::take(uint64_t bytes, ChannelClient::Allocation* out) {
  {
    const Lock lock(mutex_);
    const auto fits =
        std::find_if(idle_.begin(), idle_.end(), [bytes](const auto& stage) { return stage.memory->bytes() >= bytes; });
    if (fits != idle_.end()) {
      idle_bytes_ -= fits->memory->bytes();
      *out = std::move(*fits);
      idle_.erase(fits);
      return Status::ok();
    }
  }
  uint64_t size = kSmallest;
  while (size < bytes && size < limits_.largest) size *= 2;
  return client_->alloc(std::max(size, bytes), out);
}

void StagePool::put(ChannelClient::Allocation stage, bool clean) {
  const uint64_t bytes = stage.memory->bytes();
  if (clean && bytes <= limits_.largest) {
    const Lock lock(mutex_);
    const auto place =
        std::find_if(idle_.begin(), idle_.end(), [bytes](const auto& other) { return other.memory->bytes() >= bytes; });
    idle_.insert(place, std::move(stage));
    idle_bytes_ += bytes;
    if (idle_bytes_ <= limits_.most) return;
    stage = std::move(idle_.front());  // one that is small is soon made again
    idle_.erase(idle_.begin());
    idle_bytes_ -= stage.memory->bytes();
  }
  static_cast<void>(client_->free_segment(stage.id));  // fails if the daemon is gone, and with it the memory
}

Transfer::Transfer(ChannelClient* client, StagePool* pool, const TransferRequest& request)
    : client_(client),
      pool_(pool),
      request_(request),
      element_(dtype_size(static_cast<DType>(request.descriptor.dtype))),
      generation_(request.generation != 0 ? request.generation : client->generation()) {}

Transfer::~Transfer() {
  for (const Piece& piece : flying_) client_->abandon(piece.ticket);
  if (stage_.memory != nullptr) pool_->put(std::move(stage_), over_);
}

void Transfer::plan() {
  planned_ = true;
  const uint64_t count = request_.descriptor.count;
  const auto look = [&](const char* data, uint64_t rows, Side* side) {
    if (data == nullptr || count == 0) return;
    side->staged = !client_->locate(data, rows * count * element_, &side->segment, &side->offset);
  };
  look(request_.src, request_.src_rows, &src_);
  look(request_.dst, request_.dst_rows, &dst_);
  const bool local = client_->on_one_host(request_.descriptor.comm);
  const uint64_t rows = std::max(request_.src_rows, request_.dst_rows);
  const uint64_t limit = std::max((local ? kLocalPiece : kRemotePiece) / rows, kLeastRow) / element_;
  piece_ = !request_.whole && (rows <= 1 || request_.rows) && count > limit ? limit : count;
  src_.staged = src_.staged || (request_.src != nullptr && request_.src_rows > 1 && piece_ < count);
  dst_.staged = dst_.staged || (request_.dst != nullptr && request_.dst_rows > 1 && piece_ < count);
  pieces_ = count == 0 ? 1 : (count + piece_ - 1) / piece_;
  const uint64_t src_bytes = src_.staged ? piece_ * request_.src_rows * element_ : 0;
  const uint64_t dst_bytes = dst_.staged ? piece_ * request_.dst_rows * element_ : 0;
  dst_begin_ = request_.together && src_.staged && dst_.staged ? 0 : line(src_bytes);
  slot_bytes_ = line(std::max(src_bytes, dst_bytes == 0 ? 0 : dst_begin_ + dst_bytes));
  depth_ = std::min(pieces_, slot_bytes_ == 0 ? kUnstaged : local ? kLocalStaged : kRemoteStaged);
  streaming_ = request_.dst_rows * count * element_ >= kStreamingBytes;
}

uint64_t Transfer::elements_of(uint64_t number) const {
  return std::min(piece_, request_.descriptor.count - begin_of(number));
}

// The daemon is woken once for pieces that follow each other at once: it does them as one.
Status Transfer::start() {
  if (over_) return Status::ok();
  if (!planned_) plan();
  if (slot_bytes_ != 0 && stage_.memory == nullptr) {
    if (Status status = pool_->take(slot_bytes_ * depth_, &stage_); !status) return status;
  }
  const bool copies = slot_bytes_ != 0;
  bool ring = false;
  Status status;
  while (status && next_ < pieces_ && flying_.size() < depth_) {
    status = submit(next_, copies ? nullptr : &ring);
    if (status) ++next_;
  }
  if (ring) client_->ring();
  crowded_ = !status && status.code() == Code::kResource;
  return crowded_ && !flying_.empty() ? Status::ok() : status;
}

Status Transfer::submit(uint64_t number, bool* ring) {
  const uint64_t elements = elements_of(number), begin = begin_of(number) * element_;
  const uint64_t slot = number % depth_ * slot_bytes_;
  Descriptor descriptor = request_.descriptor;
  descriptor.count = elements;
  if (src_.staged) {
    const uint64_t bytes = elements * element_, row = request_.descriptor.count * element_;
    copy_rows(stage_of(number), bytes, request_.src + begin, row, request_.src_rows, bytes, false);
  }
  const auto place = [&](const Side& side, uint64_t within, uint32_t* segment, uint64_t* offset) {
    *segment = side.staged ? static_cast<uint32_t>(stage_.id) : side.segment;
    *offset = side.staged ? slot + within : side.segment != 0 ? side.offset + begin : 0;
  };
  place(src_, 0, &descriptor.src_segment, &descriptor.src_offset);
  place(dst_, dst_begin_, &descriptor.dst_segment, &descriptor.dst_offset);
  if (request_.together && request_.dst == nullptr) {
    descriptor.dst_segment = descriptor.src_segment;
    descriptor.dst_offset = descriptor.src_offset;
  }
  uint64_t ticket = 0;
  if (Status status = client_->submit(descriptor, &ticket, {generation_, counted_, ring}); !status) return status;
  counted_ = true;
  flying_.push_back({ticket, number});
  return Status::ok();
}

void Transfer::take_out(uint64_t number) {
  if (!dst_.staged) return;
  char* const to = request_.dst + begin_of(number) * element_;
  const char* const from = stage_of(number) + dst_begin_;
  const uint64_t bytes = elements_of(number) * element_;
  copy_rows(to, request_.descriptor.count * element_, from, bytes, request_.dst_rows, bytes, streaming_);
}

Status Transfer::run(int64_t deadline_ns, const ChannelClient::Interrupt& interrupt) {
  const Status tried = meet(interrupt);
  if (over_ || (!tried && tried.code() != Code::kAborted)) return tried;
  if (!tried) {  // the other ranks need it all the same
    const Status status = start();
    return status ? tried : status;
  }
  while (!over_) {
    if (Status status = step(deadline_ns, interrupt); !status) {
      if (status.code() == Code::kAborted) submit_rest();
      return status;
    }
  }
  return Status::ok();
}

// The other ranks need all pieces, though this one was interrupted. Where there is no room they are told that ranks
// call different operations.
void Transfer::submit_rest() {
  if (next_ == pieces_) return;
  for (const Piece& piece : flying_) client_->abandon(piece.ticket);
  flying_.clear();
  if (stage_.memory != nullptr) pool_->put(std::exchange(stage_, {}), false);
  depth_ = pieces_ - next_;
  static_cast<void>(start());
}

Status Transfer::step(int64_t deadline_ns, const ChannelClient::Interrupt& interrupt) {
  if (Status status = start(); !status || over_) return status;
  // From a stage in order, to have its slot again. In shared memory the last one first: one wait for all.
  const bool in_order = slot_bytes_ != 0;
  const Piece piece = in_order ? flying_.front() : flying_.back();
  ChannelClient::Times times;
  if (Status status = client_->wait(piece.ticket, deadline_ns, interrupt, &times); !status) return status;
  in_order ? flying_.pop_front() : flying_.pop_back();
  source_ = times.source;
  take_out(piece.number);
  over_ = next_ == pieces_ && flying_.empty();
  return Status::ok();
}

}  // namespace bagua
