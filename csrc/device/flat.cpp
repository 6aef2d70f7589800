#include "device/flat.h"

namespace bagua::device {

int nccl_type(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return kNcclFloat32;
    case DType::kF64:
      return kNcclFloat64;
    case DType::kF16:
      return kNcclFloat16;
    case DType::kBF16:
      return kNcclBfloat16;
    case DType::kI32:
      return kNcclInt32;
    case DType::kI64:
      return kNcclInt64;
    case DType::kU8:
      return kNcclUint8;
    case DType::kI8:
      return kNcclInt8;
    case DType::kBool:
    case DType::kI16:
      return -1;
  }
  return -1;
}

int nccl_op(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return kNcclSum;
    case ReduceOp::kProduct:
      return kNcclProd;
    case ReduceOp::kMin:
      return kNcclMin;
    case ReduceOp::kMax:
      return kNcclMax;
    case ReduceOp::kAvg:
      return kNcclAvg;
    case ReduceOp::kBor:
    case ReduceOp::kBand:
    case ReduceOp::kBxor:
      return -1;
  }
  return -1;
}

namespace {
bool is_float(DType dtype) {
  return dtype <= DType::kBF16;
}
bool reduces(Kind kind) {
  return kind == Kind::kAllReduce || kind == Kind::kReduce || kind == Kind::kReduceScatter;
}
}  // namespace

Flat::~Flat() {
  if (stream_ != nullptr) runtime_->libraries.cuda.stream_destroy(stream_);
}

Status Flat::open() {
  return runtime_->make_stream(&stream_);
}

bool Flat::idle() const {
  return runtime_->libraries.cuda.stream_query(stream_) != kCudaNotReady;
}

bool Flat::takes(const Operation& operation) const {
  const Kind kind = operation.kind();
  // NCCL would hold up everything behind a send that nobody receives yet; the daemons do not.
  if (kind == Kind::kSend || kind == Kind::kRecv) return false;
  if (!reduces(kind)) return true;
  if (nccl_type(operation.dtype()) < 0 || nccl_op(operation.op()) < 0) return false;
  // Products of integers wrap around in NCCL as here; MIN and MAX of floats treat NaN otherwise than torch does.
  const bool compares = operation.op() == ReduceOp::kMin || operation.op() == ReduceOp::kMax;
  if (compares && is_float(operation.dtype())) return false;
  if (operation.op() == ReduceOp::kAvg && !is_float(operation.dtype()) && !kernels_) return false;
  return operation.descriptor.codec == 0 || !encodes_ || kernels_;
}

Status Flat::submit(const Operation& operation, CudaEvent begin) {
  const CudaRuntime& cuda = runtime_->libraries.cuda;
  Status status = runtime_->cuda(cuda.stream_wait_event(stream_, begin, 0), "waiting for the caller's stream");
  if (!status) return status;
  const NcclComm comm = handle_->begin();
  if (comm == nullptr) return {Code::kAborted, "the communicator was aborted"};
  status = run(operation, comm);
  handle_->end();
  if (!status) return status;
  return runtime_->cuda(cuda.event_record(operation.end, stream_), "recording an event");
}

Status Flat::run(const Operation& operation, NcclComm comm) {
  switch (operation.kind()) {
    case Kind::kAllReduce:
      return all_reduce(operation, comm);
    case Kind::kReduce:
    case Kind::kReduceScatter: {
      const Nccl& nccl = runtime_->libraries.nccl;
      const bool divided = operation.op() == ReduceOp::kAvg && !is_float(operation.dtype());
      const int type = nccl_type(operation.dtype()), op = divided ? kNcclSum : nccl_op(operation.op());
      const uint64_t count = operation.descriptor.count;
      const bool scatter = operation.kind() == Kind::kReduceScatter;
      Status status =
          scatter ? runtime_->nccl(nccl.reduce_scatter(operation.src, operation.dst, count, type, op, comm, stream_),
                                   "reduce-scatter")
                  : runtime_->nccl(nccl.reduce(operation.src, operation.dst, count, type, op, operation.descriptor.root,
                                               comm, stream_),
                                   "reduce");
      if (status && divided && operation.dst != nullptr) status = divide(operation, count);
      return status;
    }
    case Kind::kBarrier:
      return barrier(comm);
    default:
      return move(operation, comm);
  }
}

Status Flat::all_reduce(const Operation& operation, NcclComm comm) {
  const Descriptor& d = operation.descriptor;
  if (d.codec != 0 && encodes_) return encoded_all_reduce(this, operation, comm);
  const bool divided = operation.op() == ReduceOp::kAvg && !is_float(operation.dtype());
  const int op = divided ? kNcclSum : nccl_op(operation.op());
  const Status status =
      runtime_->nccl(runtime_->libraries.nccl.all_reduce(operation.src, operation.dst, d.count,
                                                         nccl_type(operation.dtype()), op, comm, stream_),
                     "all-reduce");
  return status && divided ? divide(operation, d.count) : status;
}

Status Flat::divide(const Operation& operation, uint64_t count) {
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

// Moves have no arithmetic: bytes, whatever the elements.
Status Flat::move(const Operation& operation, NcclComm comm) {
  const Nccl& nccl = runtime_->libraries.nccl;
  const uint64_t bytes = operation.descriptor.count * element_bytes(operation.dtype());
  switch (operation.kind()) {
    case Kind::kBroadcast:
      return runtime_->nccl(
          nccl.broadcast(operation.src, operation.dst, bytes, kNcclUint8, operation.descriptor.root, comm, stream_),
          "broadcast");
    case Kind::kAllGather:
      return runtime_->nccl(nccl.all_gather(operation.src, operation.dst, bytes, kNcclUint8, comm, stream_),
                            "all-gather");
    default:
      return exchange(operation, comm);
  }
}

// Gather, scatter and all-to-all: grouped sends and receives.
Status Flat::exchange(const Operation& operation, NcclComm comm) {
  const Nccl& nccl = runtime_->libraries.nccl;
  const uint64_t bytes = operation.descriptor.count * element_bytes(operation.dtype());
  const Kind kind = operation.kind();
  const int root = operation.descriptor.root;
  if (bytes == 0) return Status::ok();
  Status status = runtime_->nccl(nccl.group_start(), "group");
  if (!status) return status;
  for (int peer = 0; peer < handle_->ranks() && status; ++peer) {
    const uint64_t block = static_cast<uint64_t>(peer) * bytes;
    const bool sends = kind == Kind::kAllToAll || (kind == Kind::kGather ? peer == root : handle_->rank() == root);
    const bool takes = kind == Kind::kAllToAll || (kind == Kind::kGather ? handle_->rank() == root : peer == root);
    if (sends) {
      const char* const from = operation.src + (kind == Kind::kGather ? 0 : block);
      status = runtime_->nccl(nccl.send(from, bytes, kNcclUint8, peer, comm, stream_), "send");
    }
    if (takes && status) {
      char* const to = operation.dst + (kind == Kind::kScatter ? 0 : block);
      status = runtime_->nccl(nccl.recv(to, bytes, kNcclUint8, peer, comm, stream_), "receive");
    }
  }
  const Status ended = runtime_->nccl(nccl.group_end(), "group");
  return status ? ended : status;
}

Status Flat::barrier(NcclComm comm) {
  char* word = nullptr;
  if (Status status = memory_.scratch(kBarrierRoom, 256, &word); !status) return status;
  return runtime_->nccl(runtime_->libraries.nccl.all_reduce(word, word, 1, kNcclUint8, kNcclMax, comm, stream_),
                        "barrier");
}

}  // namespace bagua::device
