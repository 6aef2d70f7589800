// One operation of a rank on device memory.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <string>

#include "base/status.h"
#include "channel/layout.h"
#include "gpu/leg/runtime.h"

namespace bagua::device {

enum class Route : uint8_t { kStaged = 0, kFlat = 1, kHierarchical = 2 };
constexpr int kRoutes = 3;
inline const char* route_name(Route route) {
  constexpr const char* kNames[kRoutes] = {"staged", "flat", "hierarchical"};
  return kNames[static_cast<int>(route)];
}

// The caller owns the memory; `descriptor` has no segments and offsets yet.
struct Operation {
  Descriptor descriptor{};
  const char* src = nullptr;  // on the device; nullptr: this rank contributes nothing
  char* dst = nullptr;
  uint64_t src_bytes = 0, dst_bytes = 0;

  CudaEvent end = nullptr;    // recorded after the operation; constant while the ticket is valid
  CudaEvent begun = nullptr;  // recorded before NCCL's work; created by OperationsInFlight

  // done_ns: when a thread first saw that `end` had passed. At most one poll of the watcher (100 ms) late, unless the
  // context's lock delayed the poll.
  std::atomic<int64_t> submitted_ns{0}, started_ns{0}, done_ns{0};
  std::atomic<int64_t> awaited_ns{0};  // since when a caller waits for it; 0: no caller waits

  // Used by the staged route:
  Pinned memory;  // shared with the daemon: the input, and at dst_offset the result
  uint64_t dst_offset = 0;
  uint32_t sequence = 0;     // in its StagedRoute
  uint64_t host_ticket = 0;  // of the daemon; guarded by StagedRoute::queue_mutex_
  enum class Stage : uint8_t { kCopying, kAtHost, kFailed };
  bool enqueued = false;          // all its work is enqueued; guarded by StagedRoute::queue_mutex_
  Stage stage = Stage::kCopying;  // guarded by StagedRoute::queue_mutex_
  class StagedRoute* staged = nullptr;

  // The record is reused when `retired` and `released` are both true. Guarded by OperationTable::mutex_.
  uint64_t ticket = 0;   // 0: free
  bool retired = true;   // no route uses it
  bool released = true;  // no caller uses it

  void seen_done(int64_t now) {
    int64_t unknown = 0;
    done_ns.compare_exchange_strong(unknown, now);
  }
  Kind kind() const { return static_cast<Kind>(descriptor.kind); }
  DType dtype() const { return static_cast<DType>(descriptor.dtype); }
  ReduceOp op() const { return static_cast<ReduceOp>(descriptor.op); }
};

// Checks a caller's arguments before anything is enqueued: NCCL does not check them (the daemon does). Sets src_bytes
// and dst_bytes. `index` is the caller's index among `members` members.
Status check_operation(Operation* operation, int index, int members);
// "all-reduce (bucket 3) of communicator 2"
std::string name_of(const Operation& operation);

}  // namespace bagua::device
