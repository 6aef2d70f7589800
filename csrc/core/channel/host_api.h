// A table of C functions through which the GPU leg (csrc/gpu/leg) and the backend of torch.distributed (csrc/c10d),
// libraries of their own, use a rank's channel: no library needs the other's symbols. It travels in a capsule
// (`Rank.host_api()` in core.pyi).
//
// Every function may be called from any thread. Those that return int give a HostCode, and write the reason, cut and
// terminated, to `error`. The table lives as long as the Rank.
#pragma once

#include <cstddef>
#include <cstdint>

#include "channel/layout.h"

namespace bagua {

class ChannelClient;
class StagePool;
class Transfer;

constexpr uint32_t kHostApiVersion = 2;
constexpr const char* kHostApiCapsule = "bagua.host_api";

enum HostCode : int { kHostOk = 0, kHostTimeout = 1, kHostInterrupted = 2, kHostFailed = 3, kHostBusy = 4 };

struct HostError {
  char text[kErrorBytes + 1];
};

// An operation on memory at any address, for transfer.h. The memory must stay until the transfer is over or destroyed.
struct TransferRequest {
  Descriptor descriptor{};  // all but the places; count: elements of one row
  const char* src = nullptr;
  char* dst = nullptr;    // nullptr: this rank gives, or gets, nothing. src == dst: in place
  uint64_t src_rows = 1;  // src holds so many times `count` elements
  uint64_t dst_rows = 1;
  bool together = false;    // src and dst may share a place, and do if there is no dst
  uint64_t generation = 0;  // to which it belongs; 0: the present one
  // How it is cut: the same on all ranks. whole: not at all. rows: operations of several rows are cut, too, each row
  // alike; their tensors in shared memory are then copied as others are.
  bool whole = false, rows = false;
};

// How far a transfer is, see transfer.h.
struct TransferState {
  bool submitted, over;
  int source;
};

struct HostApi {
  uint32_t version;
  ChannelClient* client;
  int (*submit)(ChannelClient*, const Descriptor*, uint64_t* ticket, HostError*);
  // `interrupted(context)` is asked every 100 ms or so; true ends the wait with kHostInterrupted. deadline_ns < 0:
  // none.
  int (*wait)(ChannelClient*, uint64_t ticket, int64_t deadline_ns, bool (*interrupted)(void*), void* context,
              HostError*);
  int (*alloc)(ChannelClient*, uint64_t bytes, uint64_t* segment, void** data, uint64_t* size, HostError*);
  // The mapping goes at once; no operation may be in flight on it.
  int (*free)(ChannelClient*, uint64_t segment, HostError*);
  int (*create_comm)(ChannelClient*, uint32_t comm, const int32_t* ranks, size_t count, int64_t timeout_ns, HostError*);
  int (*destroy_comm)(ChannelClient*, uint32_t comm, HostError*);
  // Sleeps until the engine has failed, ended or died, or the generation is suspended: kHostFailed, with the reason.
  // kHostTimeout: not by then. May return kHostOk for no reason, and does after nudge().
  int (*wait_failure)(ChannelClient*, int64_t deadline_ns, HostError*);
  void (*nudge)(ChannelClient*);
  uint64_t (*encoded_bytes)(uint8_t codec, uint16_t density, uint64_t count);

  // Transfers, see transfer.h. A pool lives longer than its transfers. kHostBusy: too many operations are in flight,
  // call it again.
  StagePool* (*make_stages)(ChannelClient*, uint64_t largest, uint64_t most);
  void (*free_stages)(StagePool*);
  Transfer* (*make_transfer)(ChannelClient*, StagePool*, const TransferRequest*);
  int (*run_transfer)(Transfer*, int64_t deadline_ns, bool (*interrupted)(void*), void* context, HostError*);
  int (*start_transfer)(Transfer*, HostError*);
  int (*step_transfer)(Transfer*, int64_t deadline_ns, bool (*interrupted)(void*), void* context, HostError*);
  TransferState (*state_of_transfer)(const Transfer*);
  void (*free_transfer)(Transfer*);

  // See kernel/reduce.h: `ranks` sources into one result. AVG divides by their number.
  void (*reduce)(uint8_t dtype, uint8_t op, const void* const* src, int ranks, void* dst, size_t count);
  size_t (*dtype_bytes)(uint8_t dtype);
};

HostApi host_api(ChannelClient* client);

}  // namespace bagua
