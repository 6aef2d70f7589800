// The flat route: NCCL between all members of a communicator, on a stream of its own.
//
// Thread safety: one thread at a time (Communicator::mutex_).
#pragma once

#include <memory>
#include <vector>

#include "gpu/leg/device_memory.h"
#include "gpu/leg/nccl_handle.h"
#include "gpu/leg/operation.h"

namespace bagua::device {

// NCCL's code of an element type; -1: NCCL has none.
int nccl_type(DType dtype);
int nccl_op(ReduceOp op);
inline bool is_float(DType dtype) {
  return dtype <= DType::kBF16;
}
// Whether NCCL has the reduction, with our results.
bool nccl_reduces(const Operation& operation);

class FlatRoute {
 public:
  // `encodes`: members are on several hosts, so codecs apply as in the daemons. `kernels`: all members have the
  // kernels.
  FlatRoute(Runtime* runtime, std::shared_ptr<NcclHandle> handle, bool encodes, bool kernels)
      : runtime_(runtime), handle_(std::move(handle)), encodes_(encodes), kernels_(kernels), memory_(runtime) {}
  ~FlatRoute();

  Status open();
  // True if this route can run the operation. Depends only on arguments that must be equal at all members.
  bool takes(const Operation& operation) const;
  // Enqueues the operation behind `begin` and records its end.
  Status submit(const Operation& operation, CudaEvent begin);
  // True if the device has nothing to do, apart from work that waits for other ranks.
  bool idle() const;

 private:
  friend class EncodedAllReduce;
  enum Room : int { kBarrierRoom, kSendRoom, kReceiveRoom, kResultRoom, kSumRoom };
  uint64_t members() const { return static_cast<uint64_t>(handle_->ranks()); }
  Status run(const Operation& operation);
  Status reduction(const Operation& operation);
  // Divides sums of integers with a kernel that truncates as the daemons do.
  Status divide(const Operation& operation, uint64_t count);
  Status move(const Operation& operation);
  Status exchange(const Operation& operation);
  Status barrier();

  Runtime* const runtime_;
  const std::shared_ptr<NcclHandle> handle_;
  const bool encodes_, kernels_;
  DeviceMemory memory_;
  CudaStream stream_ = nullptr;        // constant after open()
  std::vector<const void*> messages_;  // a member to avoid allocations
};

// All-reduce with encoded messages: like collective/compressed.cpp, with ranks in place of hosts. Rank r owns block r.
// (a) Each rank encodes its vector without the own block and sends it to the owners. (b) The owner adds, divides for
// AVG, and encodes the result. (c) All ranks gather and decode the results. All ranks get the same bits. The last
// Descriptor::exact elements use NCCL's own all-reduce.
Status encoded_all_reduce(FlatRoute* flat, const Operation& operation);

}  // namespace bagua::device
