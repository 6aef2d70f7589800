#include <algorithm>
#include <vector>

#include "codec/codec.h"
#include "gpu/leg/flat_route.h"

namespace bagua::device {

namespace {

constexpr uint64_t kTile = 1024, kTopKBlock = 16384;  // elements: parts have complete blocks of codecs
constexpr uint64_t kAlign = 64;                       // bytes: alignment of messages

struct Range {
  uint64_t begin = 0, count = 0;
};

}  // namespace

class EncodedAllReduce {
 public:
  EncodedAllReduce(FlatRoute* flat, const Operation& operation)
      : flat_(flat),
        runtime_(flat->runtime_),
        operation_(operation),
        count_(operation.descriptor.count - operation.descriptor.exact),
        n_(flat->handle_->ranks()),
        me_(flat->handle_->rank()),
        src_(reinterpret_cast<const float*>(operation.src)),
        dst_(reinterpret_cast<float*>(operation.dst)) {
    slot_ = (bytes_of(block(0).count) + kAlign - 1) / kAlign * kAlign;
  }

  Status run() {
    if (Status status = tail(); !status || count_ == 0) return status;
    if (Status status = prepare(); !status) return status;
    if (Status status = encode_others(); !status) return status;
    if (Status status = exchange(); !status) return status;
    if (Status status = combine(); !status) return status;
    return gather();
  }

 private:
  // Reduces the last elements without encoding.
  Status tail() {
    const uint64_t exact = operation_.descriptor.exact;
    if (exact == 0) return Status::ok();
    return flat_->handle_->launch("all-reduce", [&](NcclComm comm) {
      return runtime_->libraries.nccl.all_reduce(src_ + count_, dst_ + count_, exact, kNcclFloat32,
                                                 nccl_op(operation_.op()), comm, flat_->stream_);
    });
  }

  Status prepare() {
    const Descriptor& d = operation_.descriptor;
    const uint64_t all = slot_ * static_cast<uint64_t>(n_);
    Status status = flat_->memory_.scratch(FlatRoute::kSendRoom, all, &sent_);
    if (status) status = flat_->memory_.scratch(FlatRoute::kReceiveRoom, all, &received_);
    if (status) status = flat_->memory_.scratch(FlatRoute::kResultRoom, all, &results_);
    if (status && d.residual != 0) status = flat_->memory_.residual(d.residual, d.count, flat_->stream_, &residual_);
    return status;
  }

  Range block(int owner) const {
    const uint64_t unit = operation_.descriptor.codec == static_cast<uint8_t>(Codec::kTopK) ? kTopKBlock : kTile;
    const uint64_t units = (count_ + unit - 1) / unit, n = static_cast<uint64_t>(n_), o = static_cast<uint64_t>(owner);
    const uint64_t first = units / n * o + std::min(units % n, o), more = units / n + (o < units % n ? 1 : 0);
    const uint64_t begin = std::min(first * unit, count_), end = std::min((first + more) * unit, count_);
    return {begin, end - begin};
  }
  uint64_t bytes_of(uint64_t count) const {
    const Descriptor& d = operation_.descriptor;
    return runtime_->host.encoded_bytes(d.codec, d.density, count);
  }
  char* slot(char* room, int rank) const { return room + slot_ * static_cast<uint64_t>(rank); }
  float* residual_at(const Range& range) const { return residual_ == nullptr ? nullptr : residual_ + range.begin; }

  BaguaTranscode pass_over(const Range& range) const {
    BaguaTranscode work{};
    work.codec = operation_.descriptor.codec;
    work.density = operation_.descriptor.density;
    work.count = range.count;
    work.scale = 1.0f;
    return work;
  }
  Status launch(const BaguaTranscode& work) {
    return runtime_->cuda(runtime_->libraries.kernels.transcode(&work, flat_->stream_), "a codec's kernel");
  }

  Status encode_others() {
    Status status;
    for (int owner = 0; owner < n_ && status; ++owner) {
      const Range range = block(owner);
      if (owner == me_ || range.count == 0) continue;
      const float* const raw[] = {src_ + range.begin};
      BaguaTranscode work = pass_over(range);
      work.raw = raw;
      work.raws = 1;
      work.residual = residual_at(range);
      work.message = slot(sent_, owner);
      status = launch(work);
    }
    return status;
  }

  Status exchange() {
    const Nccl& nccl = runtime_->libraries.nccl;
    const uint64_t own = bytes_of(block(me_).count);
    return flat_->handle_->launch("sends and receives", [&](NcclComm comm) {
      NcclResult code = kNcclOk;
      for (int peer = 0; peer < n_ && goes_on(code); ++peer) {
        const uint64_t theirs = bytes_of(block(peer).count);
        if (peer == me_) continue;
        if (theirs > 0) code = nccl.send(slot(sent_, peer), theirs, kNcclUint8, peer, comm, flat_->stream_);
        if (own > 0 && goes_on(code)) {
          code = nccl.recv(slot(received_, peer), own, kNcclUint8, peer, comm, flat_->stream_);
        }
      }
      return code;
    });
  }

  // Computes the own block: own values plus the messages, in the order of ranks. If there are more messages than one
  // launch takes, a partial sum carries over.
  Status combine() {
    const Range range = block(me_);
    if (range.count == 0) return Status::ok();
    std::vector<const void*>& messages = flat_->messages_;
    messages.clear();
    for (int peer = 0; peer < n_; ++peer) {
      if (peer != me_) messages.push_back(slot(received_, peer));
    }
    const float* raw = src_ + range.begin;
    size_t done = 0;
    constexpr size_t kMost = BAGUA_KERNELS_MOST_INPUTS - 1;
    while (messages.size() - done > kMost) {
      char* sum = nullptr;
      if (Status status = flat_->memory_.scratch(FlatRoute::kSumRoom, range.count * sizeof(float), &sum); !status) {
        return status;
      }
      float* const target = reinterpret_cast<float*>(sum);
      if (Status status = add(range, raw, messages.data() + done, kMost, target); !status) return status;
      raw = target;
      done += kMost;
    }
    return finish(range, raw, messages.data() + done, messages.size() - done);
  }

  Status add(const Range& range, const float* raw, const void* const* messages, size_t count, float* target) {
    float* const decoded[] = {target};
    BaguaTranscode work = pass_over(range);
    work.raw = &raw;
    work.raws = 1;
    work.encoded = messages;
    work.encodeds = static_cast<int32_t>(count);
    work.decoded = decoded;
    work.decodeds = 1;
    return launch(work);
  }

  Status finish(const Range& range, const float* raw, const void* const* messages, size_t count) {
    float* const decoded[] = {dst_ + range.begin};
    BaguaTranscode work = pass_over(range);
    work.raw = &raw;
    work.raws = 1;
    work.encoded = messages;
    work.encodeds = static_cast<int32_t>(count);
    if (operation_.op() == ReduceOp::kAvg) work.scale = 1.0f / static_cast<float>(n_);
    work.residual = residual_at(range);
    work.message = slot(results_, me_);
    work.decoded = decoded;
    work.decodeds = 1;
    return launch(work);
  }

  Status gather() {
    Status status = flat_->handle_->launch("all-gather", [&](NcclComm comm) {
      return runtime_->libraries.nccl.all_gather(slot(results_, me_), results_, slot_, kNcclUint8, comm,
                                                 flat_->stream_);
    });
    for (int owner = 0; owner < n_ && status; ++owner) {
      const Range range = block(owner);
      if (owner == me_ || range.count == 0) continue;
      const void* const encoded[] = {slot(results_, owner)};
      float* const decoded[] = {dst_ + range.begin};
      BaguaTranscode work = pass_over(range);
      work.encoded = encoded;
      work.encodeds = 1;
      work.decoded = decoded;
      work.decodeds = 1;
      status = launch(work);
    }
    return status;
  }

  FlatRoute* const flat_;
  Runtime* const runtime_;
  const Operation& operation_;
  const uint64_t count_;  // elements that are sent encoded
  const int n_, me_;
  const float* const src_;
  float* const dst_;
  uint64_t slot_ = 0;                                                // aligned size of the largest message, in bytes
  char *sent_ = nullptr, *received_ = nullptr, *results_ = nullptr;  // each has one slot per rank
  float* residual_ = nullptr;
};

Status encoded_all_reduce(FlatRoute* flat, const Operation& operation) {
  return EncodedAllReduce(flat, operation).run();
}

}  // namespace bagua::device
