// One operation on a rank's tensors, in shared or in ordinary memory. Tensors in ordinary memory are copied through a
// stage in shared memory: large ones in pieces, so that copying in, the daemon's work and copying out overlap and stay
// in the caches.
//
// All ranks cut alike, wherever their tensors lie: pieces depend on the communicator, kind, size and dtype alone.
//
// Thread safety: StagePool any thread; a Transfer one thread at a time.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "base/mutex.h"
#include "base/status.h"
#include "channel/client.h"
#include "channel/host_api.h"
#include "channel/layout.h"

namespace bagua {

// Stages that no operation uses at the moment, kept so that the next need not have its pages touched for the first
// time.
class StagePool {
 public:
  // How much is kept: stages up to `largest` bytes, and all of them together up to `most` bytes.
  struct Limits {
    uint64_t largest = 8 << 20, most = 16 << 20;
  };
  explicit StagePool(ChannelClient* client) : StagePool(client, Limits()) {}
  StagePool(ChannelClient* client, const Limits& limits) : client_(client), limits_(limits) {}

  // One of at least `bytes`.
  Status take(uint64_t bytes, ChannelClient::Allocation* out);
  // Keeps it, or gives it back to the daemon: a large one, or one that an interrupted operation may still write to
  // (`clean` is false).
  void put(ChannelClient::Allocation stage, bool clean);

 private:
  static constexpr uint64_t kSmallest = 64 << 10;  // bytes

  ChannelClient* const client_;
  const Limits limits_;
  Mutex mutex_;                                                     // guards the next two; held for no request
  std::vector<ChannelClient::Allocation> idle_ GUARDED_BY(mutex_);  // the smallest first
  uint64_t idle_bytes_ GUARDED_BY(mutex_) = 0;
};

class Transfer {
 public:
  Transfer(ChannelClient* client, StagePool* pool, const TransferRequest& request);
  ~Transfer();
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  // Goes on until all is done. kTimeout: not by the deadline (< 0: none), call it again. kAborted: interrupted. After
  // any error but kTimeout dst may hold parts of the result.
  Status run(int64_t deadline_ns, const ChannelClient::Interrupt& interrupt);

  // The same in steps. start() submits what may fly now, and does not wait. step() also waits for one piece: it is
  // called until over().
  Status start();
  Status step(int64_t deadline_ns, const ChannelClient::Interrupt& interrupt);
  bool submitted() const { return over_ || next_ == pieces_; }  // all of it
  bool over() const { return over_; }
  bool crowded() const { return crowded_; }  // why start() or step() failed: it is to be called again
  int source() const { return source_; }     // of a receive that is over: index of the sender

 private:
  struct Piece {
    uint64_t ticket, number;
  };
  struct Side {
    bool staged = false;
    uint32_t segment = 0;  // where it lies, if not staged
    uint64_t offset = 0;
  };

  void plan();
  Status submit(uint64_t number, bool* ring);
  // Small ones are tried without the daemon, once.
  Status meet(const ChannelClient::Interrupt& interrupt) {
    if (counted_) return Status::ok();
    return client_->meet(request_.descriptor, generation_, request_.src, request_.dst, interrupt, &counted_, &over_);
  }
  void take_out(uint64_t number);
  void submit_rest();
  uint64_t begin_of(uint64_t number) const { return number * piece_; }
  uint64_t elements_of(uint64_t number) const;
  char* stage_of(uint64_t number) const { return stage_.memory->data() + number % depth_ * slot_bytes_; }

  ChannelClient* const client_;
  StagePool* const pool_;
  TransferRequest request_;
  const uint64_t element_;  // bytes

  Side src_, dst_;
  uint64_t piece_ = 0, pieces_ = 1;  // elements of a piece; how many pieces
  uint64_t depth_ = 1;               // pieces in flight
  uint64_t slot_bytes_ = 0;          // of the stage, for each piece in flight; 0: no stage
  uint64_t dst_begin_ = 0;           // of the result in a slot
  bool streaming_ = false;           // the result is too large for the caches

  ChannelClient::Allocation stage_;
  const uint64_t generation_;  // of all pieces
  uint64_t next_ = 0;          // piece to submit
  std::deque<Piece> flying_;
  bool planned_ = false;
  bool counted_ = false;  // among the collectives of the communicator
  bool over_ = false;
  bool crowded_ = false;
  int source_ = -1;
};

}  // namespace bagua
