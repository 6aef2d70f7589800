// The flat route: NCCL between all members of a communicator, on one stream of its own.
//
// Thread safety: one thread at a time (Communicator::mutex_).
#pragma once

#include <memory>
#include <vector>

#include "gpu/leg/device_memory.h"
#include "gpu/leg/nccl_handle.h"
#include "gpu/leg/operation.h"

namespace bagua::device {

// Codes that NCCL's collectives take; -1: none.
int nccl_type(DType dtype);
int nccl_op(ReduceOp op);

class FlatRoute {
 public:
  // `encodes`: members are on several hosts, so codecs are used as the daemons do. `kernels`: all members have them.
  FlatRoute(Runtime* runtime, std::shared_ptr<NcclHandle> handle, bool encodes, bool kernels)
      : runtime_(runtime), handle_(std::move(handle)), encodes_(encodes), kernels_(kernels), memory_(runtime) {}
  ~FlatRoute();

  Status open();
  // The same answer at all members: decided by what all must pass alike.
  bool takes(const Operation& operation) const;
  // Enqueues the operation behind `begin` and records its end.
  Status submit(const Operation& operation, CudaEvent begin);
  // The device is idle but for work that waits for other ranks.
  bool idle() const;

 private:
  friend class EncodedAllReduce;
  enum Room : int { kBarrierRoom, kSendRoom, kReceiveRoom, kResultRoom, kSumRoom };
  uint64_t members() const { return static_cast<uint64_t>(handle_->ranks()); }
  Status run(const Operation& operation);
  Status reduction(const Operation& operation);
  // Sums of integers are divided by a kernel: truncated, as the daemons do it.
  Status divide(const Operation& operation, uint64_t count);
  Status move(const Operation& operation);
  Status exchange(const Operation& operation);
  Status barrier();

  Runtime* const runtime_;
  const std::shared_ptr<NcclHandle> handle_;
  const bool encodes_, kernels_;
  DeviceMemory memory_;
  CudaStream stream_ = nullptr;        // constant after open()
  std::vector<const void*> messages_;  // kept for its memory
};

// All-reduce that crosses encoded, the same as collective/compressed.cpp with a rank for each host: rank r owns block
// r; (a) everybody encodes its vector but the own block and sends it to the owners; (b) the owner adds, divides for
// AVG, and encodes the result; (c) all gather the results and decode them. Bits are the same on all ranks. The last
// Descriptor::exact elements go through NCCL's own all-reduce.
Status encoded_all_reduce(FlatRoute* flat, const Operation& operation);

}  // namespace bagua::device
