// The hierarchical route of all-reduce. NCCL does a reduce-scatter inside the host. Then each rank's part goes through
// shared memory to its daemon, which sums it over the hosts, encoded if requested. Last, NCCL does an all-gather inside
// the host.
//
// It has two communicators of NCCL, each with a stream, so the reduce-scatter of the next operation need not wait for
// results from other hosts. All steps work in dst, without scratch memory.
//
// Thread safety: one thread at a time (Communicator::mutex_).
#pragma once

#include <memory>

#include "gpu/leg/nccl_handle.h"
#include "gpu/leg/operation.h"
#include "gpu/leg/operation_table.h"
#include "gpu/leg/staged_route.h"

namespace bagua::device {

class HierarchicalRoute {
 public:
  // `across`: the daemon's communicator of all ranks that have the same position in their hosts.
  HierarchicalRoute(Runtime* runtime, OperationTable* table, StagedRoute* staged, std::shared_ptr<NcclHandle> down,
                    std::shared_ptr<NcclHandle> up, uint32_t across)
      : runtime_(runtime),
        table_(table),
        staged_(staged),
        down_(std::move(down)),
        up_(std::move(up)),
        across_(across) {}
  ~HierarchicalRoute();

  Status open();
  bool takes(const Operation& operation) const;
  Status submit(const Operation& operation, CudaEvent begin);
  bool idle() const;

 private:
  // How dst is cut: each rank sends one part to other hosts. The part of the last rank also has the remainder.
  struct Cut {
    uint64_t part, rest, begin, count, exact;
  };
  Cut cut(const Operation& operation) const;
  Status reduce(const Operation& operation, const Cut& parts);
  Status spread(const Operation& operation, const Cut& parts);

  Runtime* const runtime_;
  OperationTable* const table_;
  StagedRoute* const staged_;
  const std::shared_ptr<NcclHandle> down_, up_;
  const uint32_t across_;
  CudaStream down_stream_ = nullptr, up_stream_ = nullptr;  // constant after open()
};

}  // namespace bagua::device
