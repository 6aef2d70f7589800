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

// Memory is the caller's; `descriptor` has no places (segments, offsets) yet.
struct Operation {
  Descriptor descriptor{};
  const char* src = nullptr;  // on the device; nullptr: this rank gives nothing
  char* dst = nullptr;
  uint64_t src_bytes = 0, dst_bytes = 0;

  CudaEvent end = nullptr;    // recorded behind the operation; constant while the ticket lives
  CudaEvent begun = nullptr;  // recorded where NCCL's work begins; made by OperationsInFlight

  // done_ns: when `end` was first seen to have passed, by any thread. At most one poll of the watcher (100 ms)
  // after the truth, unless the context's lock held that up.
  std::atomic<int64_t> submitted_ns{0}, started_ns{0}, done_ns{0};
  std::atomic<int64_t> awaited_ns{0};  // since when somebody waits for it; 0: nobody does

  // Of the staged route.
  Pinned memory;  // shared with the daemon: the input, and the result at dst_offset
  uint64_t dst_offset = 0;
  uint32_t sequence = 0;     // in its StagedRoute
  uint64_t host_ticket = 0;  // of the daemon; guarded by StagedRoute::queue_mutex_
  enum class Stage : uint8_t { kCopying, kAtHost, kFailed };
  bool enqueued = false;          // all its work is on the streams; guarded by StagedRoute::queue_mutex_
  Stage stage = Stage::kCopying;  // guarded by StagedRoute::queue_mutex_
  class StagedRoute* staged = nullptr;

  // Both must be true before it is used again. Guarded by OperationTable::mutex_.
  uint64_t ticket = 0;   // 0: free
  bool retired = true;   // no route needs it
  bool released = true;  // no caller needs it

  void seen_done(int64_t now) {
    int64_t unknown = 0;
    done_ns.compare_exchange_strong(unknown, now);
  }
  Kind kind() const { return static_cast<Kind>(descriptor.kind); }
  DType dtype() const { return static_cast<DType>(descriptor.dtype); }
  ReduceOp op() const { return static_cast<ReduceOp>(descriptor.op); }
};

inline uint64_t element_bytes(DType dtype) {
  constexpr uint8_t kBytes[kDTypes] = {4, 8, 2, 2, 4, 8, 1, 1, 1, 2};
  return kBytes[static_cast<int>(dtype)];
}

// How many rows of `count` elements a rank gives and gets: see channel/layout.h.
struct Rows {
  uint64_t src, dst;
};
Rows rows_of(Kind kind, bool at_root, uint64_t members);

// Checks what a caller passed before anything is enqueued: the daemon checks again what reaches it, NCCL does not.
// Sets src_bytes and dst_bytes. `index` is the caller's, of `members`.
Status check_operation(Operation* operation, int index, int members);
// "all-reduce (bucket 3) of communicator 2"
std::string name_of(const Operation& operation);

}  // namespace bagua::device
