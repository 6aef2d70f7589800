#include "gpu/leg/hierarchical_route.h"

#include "base/clock.h"
#include "gpu/leg/flat_route.h"

namespace bagua::device {

namespace {
constexpr uint64_t kUnit = 64;  // elements: parts begin at multiples of this
}

HierarchicalRoute::~HierarchicalRoute() {
  for (CudaStream stream : {down_stream_, up_stream_}) {
    if (stream != nullptr) runtime_->libraries.cuda.stream_destroy(stream);
  }
}

Status HierarchicalRoute::open() {
  Status status = runtime_->make_stream(Traffic::kCollective, &down_stream_);
  return status ? runtime_->make_stream(Traffic::kCollective, &up_stream_) : status;
}

bool HierarchicalRoute::idle() const {
  const CudaRuntime& cuda = runtime_->libraries.cuda;
  return cuda.stream_query(down_stream_) != kCudaNotReady && cuda.stream_query(up_stream_) != kCudaNotReady;
}

bool HierarchicalRoute::takes(const Operation& operation) const {
  return operation.kind() == Kind::kAllReduce && nccl_reduces(operation) &&
         (operation.op() != ReduceOp::kAvg || is_float(operation.dtype()));
}

HierarchicalRoute::Cut HierarchicalRoute::cut(const Operation& operation) const {
  const uint64_t local = static_cast<uint64_t>(down_->ranks()), me = static_cast<uint64_t>(down_->rank());
  const uint64_t count = operation.descriptor.count, exact = operation.descriptor.exact;
  Cut cut{};
  cut.part = count / local / kUnit * kUnit;
  cut.rest = count - cut.part * local;
  cut.begin = cut.part * me;
  cut.count = cut.part + (me + 1 == local ? cut.rest : 0);
  const uint64_t end = cut.begin + cut.count, encoded = count - exact;
  cut.exact = end > encoded ? end - std::max(cut.begin, encoded) : 0;
  return cut;
}

Status HierarchicalRoute::submit(const Operation& operation, CudaEvent begin) {
  const CudaRuntime& cuda = runtime_->libraries.cuda;
  const Cut parts = cut(operation);
  Status status = runtime_->cuda(cuda.stream_wait_event(down_stream_, begin, 0), "waiting for the caller's stream");
  if (status) status = runtime_->cuda(cuda.event_record(operation.begun, down_stream_), "recording an event");
  if (status) status = reduce(operation, parts);
  CudaEvent reduced = nullptr, crossed = nullptr;
  if (status) status = runtime_->take_event(&reduced);
  if (status) status = runtime_->cuda(cuda.event_record(reduced, down_stream_), "recording an event");
  uint64_t ticket = 0;
  if (status && parts.count > 0) {
    Operation* inner = nullptr;
    status = table_->take(&inner);
    if (status) {
      inner->descriptor = operation.descriptor;
      inner->descriptor.comm = across_;
      inner->descriptor.count = parts.count;
      inner->descriptor.exact = static_cast<uint32_t>(parts.exact);
      inner->descriptor.ndim = 0;
      inner->src = inner->dst = operation.dst + parts.begin * dtype_size(operation.dtype());
      inner->src_bytes = inner->dst_bytes = parts.count * dtype_size(operation.dtype());
      inner->submitted_ns = now_ns();
      ticket = inner->ticket;
      crossed = inner->end;
      status = staged_->submit(inner, reduced);
    }
  }
  if (status)
    status = runtime_->cuda(cuda.stream_wait_event(up_stream_, crossed != nullptr ? crossed : reduced, 0),
                            "waiting for the daemon");
  table_->release(ticket);
  runtime_->put_event(reduced);
  if (status) status = spread(operation, parts);
  if (!status) return status;
  return runtime_->cuda(cuda.event_record(operation.end, up_stream_), "recording an event");
}

// Reduce-scatter inside the host: each rank gets the sum of its part, in place in dst.
Status HierarchicalRoute::reduce(const Operation& operation, const Cut& parts) {
  const Nccl& nccl = runtime_->libraries.nccl;
  const uint64_t element = dtype_size(operation.dtype());
  const int type = nccl_type(operation.dtype()), op = nccl_op(operation.op()), last = down_->ranks() - 1;
  return down_->launch("reduce-scatter", [&](NcclComm comm) {
    NcclResult code = kNcclOk;
    if (parts.part > 0) {
      code = nccl.reduce_scatter(operation.src, operation.dst + parts.begin * element, parts.part, type, op, comm,
                                 down_stream_);
    }
    const uint64_t rest = parts.part * static_cast<uint64_t>(down_->ranks()) * element;
    if (goes_on(code) && parts.rest > 0) {
      code = nccl.reduce(operation.src + rest, operation.dst + rest, parts.rest, type, op, last, comm, down_stream_);
    }
    return code;
  });
}

// All-gather inside the host: each rank gets all parts.
Status HierarchicalRoute::spread(const Operation& operation, const Cut& parts) {
  const Nccl& nccl = runtime_->libraries.nccl;
  const uint64_t element = dtype_size(operation.dtype());
  const int last = up_->ranks() - 1;
  return up_->launch("all-gather", [&](NcclComm comm) {
    NcclResult code = kNcclOk;
    if (parts.part > 0) {
      code = nccl.all_gather(operation.dst + parts.begin * element, operation.dst, parts.part * element, kNcclUint8,
                             comm, up_stream_);
    }
    char* const rest = operation.dst + parts.part * static_cast<uint64_t>(up_->ranks()) * element;
    if (goes_on(code) && parts.rest > 0) {
      code = nccl.broadcast(rest, rest, parts.rest * element, kNcclUint8, last, comm, up_stream_);
    }
    return code;
  });
}

}  // namespace bagua::device
