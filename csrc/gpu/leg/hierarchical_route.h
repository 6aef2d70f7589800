// The hierarchical route of all-reduce: NCCL's reduce-scatter inside the host; each rank's part through shared memory
// and its daemon, summed over the hosts (encoded there, if asked for); NCCL's all-gather inside the host.
//
// Two communicators of NCCL, each with a stream: so the reduce-scatter of the next operation need not wait for what
// comes back from the other hosts. Everything happens in dst; no scratch.
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
  // `across`: communicator of the daemon with the ranks that have this rank's place in their hosts.
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
  // Elements of dst that this rank carries to other hosts; the last rank's part is longer by what does not divide.
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
