#include "gpu/leg/flat_route.h"

namespace bagua::device {

int nccl_type(DType dtype) {
  constexpr int kTypes[kDTypes] = {kNcclFloat32, kNcclFloat64, kNcclFloat16, kNcclBfloat16, kNcclInt32,
                                   kNcclInt64,   kNcclUint8,   -1,           kNcclInt8,     -1};
  return kTypes[static_cast<int>(dtype)];
}

int nccl_op(ReduceOp op) {
  constexpr int kOps[] = {kNcclSum, kNcclProd, kNcclMin, kNcclMax, -1, -1, -1, -1, -1, -1, kNcclAvg};
  return kOps[static_cast<int>(op)];
}

bool nccl_reduces(const Operation& operation) {
  // NCCL's products of integers wrap around as ours do. Its MIN and MAX of floats treat NaN differently from torch.
  const bool compares = operation.op() == ReduceOp::kMin || operation.op() == ReduceOp::kMax;
  return nccl_type(operation.dtype()) >= 0 && nccl_op(operation.op()) >= 0 &&
         !(compares && is_float(operation.dtype()));
}

FlatRoute::~FlatRoute() {
  if (stream_ != nullptr) runtime_->libraries.cuda.stream_destroy(stream_);
}

Status FlatRoute::open() {
  return runtime_->make_stream(Traffic::kCollective, &stream_);
}

bool FlatRoute::idle() const {
  return runtime_->libraries.cuda.stream_query(stream_) != kCudaNotReady;
}

bool FlatRoute::takes(const Operation& operation) const {
  const Kind kind = operation.kind();
  // With NCCL, a send that has no receiver yet would delay everything behind it. With the daemons it does not.
  if (kind == Kind::kSend || kind == Kind::kRecv) return false;
  if (!kind_reduces(kind)) return true;
  if (!nccl_reduces(operation)) return false;
  if (operation.op() == ReduceOp::kAvg && !is_float(operation.dtype()) && !kernels_) return false;
  return operation.descriptor.codec == 0 || !encodes_ || kernels_;
}

Status FlatRoute::submit(const Operation& operation, CudaEvent begin) {
  const CudaRuntime& cuda = runtime_->libraries.cuda;
  Status status = runtime_->cuda(cuda.stream_wait_event(stream_, begin, 0), "waiting for the caller's stream");
  if (status) status = runtime_->cuda(cuda.event_record(operation.begun, stream_), "recording an event");
  if (status) status = run(operation);
  if (!status) return status;
  return runtime_->cuda(cuda.event_record(operation.end, stream_), "recording an event");
}

Status FlatRoute::run(const Operation& operation) {
  if (operation.kind() == Kind::kBarrier) return barrier();
  if (!kind_reduces(operation.kind())) return move(operation);
  if (operation.descriptor.codec != 0 && encodes_) return encoded_all_reduce(this, operation);
  return reduction(operation);
}

Status FlatRoute::reduction(const Operation& operation) {
  const Nccl& nccl = runtime_->libraries.nccl;
  const Descriptor& d = operation.descriptor;
  const bool divided = operation.op() == ReduceOp::kAvg && !is_float(operation.dtype());
  const int type = nccl_type(operation.dtype()), op = divided ? kNcclSum : nccl_op(operation.op());
  const Status status = handle_->launch("a reduction", [&](NcclComm comm) {
    if (operation.kind() == Kind::kReduce) {
      return nccl.reduce(operation.src, operation.dst, d.count, type, op, d.root, comm, stream_);
    }
    const auto function = operation.kind() == Kind::kAllReduce ? nccl.all_reduce : nccl.reduce_scatter;
    return function(operation.src, operation.dst, d.count, type, op, comm, stream_);
  });
  return status && divided && operation.dst != nullptr ? divide(operation, d.count) : status;
}

Status FlatRoute::divide(const Operation& operation, uint64_t count) {
  const void* const inputs[] = {operation.dst};
  BaguaReduce work{};
  work.dtype = operation.descriptor.dtype;
  work.op = static_cast<uint8_t>(ReduceOp::kAvg);
  work.count = count;
  work.inputs = inputs;
  work.input_count = 1;
  work.output = operation.dst;
  work.divisor = handle_->ranks();
  return runtime_->cuda(runtime_->libraries.kernels.reduce(&work, stream_), "dividing");
}

// Broadcast and all-gather. They need no arithmetic, so elements are moved as bytes.
Status FlatRoute::move(const Operation& operation) {
  const Nccl& nccl = runtime_->libraries.nccl;
  const uint64_t bytes = operation.descriptor.count * dtype_size(operation.dtype());
  const int root = operation.descriptor.root;
  switch (operation.kind()) {
    case Kind::kBroadcast:
      return handle_->launch("broadcast", [&](NcclComm comm) {
        return nccl.broadcast(operation.src, operation.dst, bytes, kNcclUint8, root, comm, stream_);
      });
    case Kind::kAllGather:
      return handle_->launch("all-gather", [&](NcclComm comm) {
        return nccl.all_gather(operation.src, operation.dst, bytes, kNcclUint8, comm, stream_);
      });
    default:
      return bytes == 0 ? Status::ok() : exchange(operation);
  }
}

// Gather, scatter and all-to-all, by NCCL's sends and receives.
Status FlatRoute::exchange(const Operation& operation) {
  const Nccl& nccl = runtime_->libraries.nccl;
  const uint64_t bytes = operation.descriptor.count * dtype_size(operation.dtype());
  const Kind kind = operation.kind();
  const int root = operation.descriptor.root, me = handle_->rank();
  return handle_->launch("sends and receives", [&](NcclComm comm) {
    NcclResult code = kNcclOk;
    for (int peer = 0; peer < handle_->ranks() && goes_on(code); ++peer) {
      const uint64_t block = static_cast<uint64_t>(peer) * bytes;
      const bool sends = kind == Kind::kAllToAll || (kind == Kind::kGather ? peer == root : me == root);
      const bool takes = kind == Kind::kAllToAll || (kind == Kind::kGather ? me == root : peer == root);
      if (sends) {
        const char* const from = operation.src + (kind == Kind::kGather ? 0 : block);
        code = nccl.send(from, bytes, kNcclUint8, peer, comm, stream_);
      }
      if (takes && goes_on(code)) {
        char* const to = operation.dst + (kind == Kind::kScatter ? 0 : block);
        code = nccl.recv(to, bytes, kNcclUint8, peer, comm, stream_);
      }
    }
    return code;
  });
}

Status FlatRoute::barrier() {
  char* word = nullptr;
  if (Status status = memory_.scratch(kBarrierRoom, 256, &word); !status) return status;
  return handle_->launch("barrier", [&](NcclComm comm) {
    return runtime_->libraries.nccl.all_reduce(word, word, 1, kNcclUint8, kNcclMax, comm, stream_);
  });
}

}  // namespace bagua::device
