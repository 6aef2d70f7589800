// Declares the part of NCCL's binary interface that the leg uses; see cuda_types.h.
#pragma once

#include <climits>
#include <cstddef>

#include "gpu/leg/api/cuda_types.h"

namespace bagua::device {

using NcclResult = int;
using NcclComm = void*;  // ncclComm_t
constexpr NcclResult kNcclOk = 0;
constexpr NcclResult kNcclInProgress = 7;
inline bool goes_on(NcclResult code) {
  return code == kNcclOk || code == kNcclInProgress;
}

struct NcclId {
  char bytes[128];
};

// ncclConfig_t of version 2.14. Later versions see from `size` and `version` which fields a caller knows. `cluster`
// came with 2.17, in place of the padding at the end of the older structure.
struct NcclConfig {
  size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = 21400;
  int blocking = 0;  // calls return kNcclInProgress instead of waiting for other ranks
  int cluster = INT_MIN;
};
static_assert(sizeof(NcclConfig) == 24);

enum NcclType : int {
  kNcclInt8 = 0,
  kNcclUint8 = 1,
  kNcclInt32 = 2,
  kNcclInt64 = 4,
  kNcclFloat16 = 6,
  kNcclFloat32 = 7,
  kNcclFloat64 = 8,
  kNcclBfloat16 = 9,
};
enum NcclOp : int { kNcclSum = 0, kNcclProd = 1, kNcclMax = 2, kNcclMin = 3, kNcclAvg = 4 };

struct Nccl {
  NcclResult (*version)(int*);
  NcclResult (*unique_id)(NcclId*);
  NcclResult (*init_rank)(NcclComm*, int ranks, NcclId, int rank, NcclConfig*);
  NcclResult (*finalize)(NcclComm);
  NcclResult (*destroy)(NcclComm);
  NcclResult (*abort)(NcclComm);
  NcclResult (*async_error)(NcclComm, NcclResult*);
  const char* (*error_text)(NcclResult);
  NcclResult (*group_start)();
  NcclResult (*group_end)();
  NcclResult (*all_reduce)(const void*, void*, size_t, int type, int op, NcclComm, CudaStream);
  NcclResult (*reduce)(const void*, void*, size_t, int type, int op, int root, NcclComm, CudaStream);
  NcclResult (*broadcast)(const void*, void*, size_t, int type, int root, NcclComm, CudaStream);
  NcclResult (*all_gather)(const void*, void*, size_t, int type, NcclComm, CudaStream);
  NcclResult (*reduce_scatter)(const void*, void*, size_t, int type, int op, NcclComm, CudaStream);
  NcclResult (*send)(const void*, size_t, int type, int peer, NcclComm, CudaStream);
  NcclResult (*recv)(void*, size_t, int type, int peer, NcclComm, CudaStream);
  const char* (*last_error)(NcclComm);  // of this process; the argument is ignored
  // nullptr before 2.18. The child is written when the parent is ready again, and not before.
  NcclResult (*split)(NcclComm parent, int color, int key, NcclComm* child, NcclConfig*);
};

}  // namespace bagua::device
