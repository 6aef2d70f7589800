#include "gpu/leg/operation.h"

#include <cstring>

namespace bagua::device {

namespace {

constexpr uint64_t kMaxCount = uint64_t{1} << 44;
constexpr const char* kTitles[kKinds] = {"barrier",    "all-reduce",     "broadcast", "reduce",
                                         "all-gather", "reduce-scatter", "gather",    "scatter",
                                         "all-to-all", "send",           "receive",   "move of residuals"};

Status refuse(const Operation& operation, const std::string& what) {
  return {Code::kInvalid, name_of(operation) + ": " + what};
}

bool rooted(Kind kind) {
  return kind == Kind::kBroadcast || kind == Kind::kReduce || kind == Kind::kGather || kind == Kind::kScatter ||
         kind == Kind::kSend || kind == Kind::kRecv;
}

Status check_codec(const Operation& operation) {
  const Descriptor& d = operation.descriptor;
  const bool any = d.density != 0 || d.residual != 0 || d.exact != 0;
  if (d.codec == 0) {
    return any ? refuse(operation, "density, residual and exact need a codec") : Status::ok();
  }
  constexpr uint8_t kTopK = 8, kCodecs = 9;
  if (d.codec >= kCodecs) return refuse(operation, "codec " + std::to_string(d.codec) + " is unknown");
  if ((d.codec == kTopK) != (d.density != 0)) {
    return refuse(operation, "topk takes a density of 1 to 65535 (of 65536 elements), other codecs 0");
  }
  if (operation.kind() != Kind::kAllReduce || operation.dtype() != DType::kF32 ||
      (operation.op() != ReduceOp::kSum && operation.op() != ReduceOp::kAvg)) {
    return refuse(operation, "codecs take all-reduce of float32 with SUM or AVG");
  }
  if (d.exact > d.count) return refuse(operation, "more exact elements than elements");
  return Status::ok();
}

bool reduces(Kind kind) {
  return kind == Kind::kAllReduce || kind == Kind::kReduce || kind == Kind::kReduceScatter;
}

// The same rule as op_supported() of kernel/reduce.h.
bool reducible(DType dtype, ReduceOp op) {
  const bool is_float = dtype <= DType::kBF16;
  switch (op) {
    case ReduceOp::kBor:
    case ReduceOp::kBand:
    case ReduceOp::kBxor:
      return !is_float;
    case ReduceOp::kMin:
    case ReduceOp::kMax:
      return true;
    case ReduceOp::kSum:
    case ReduceOp::kProduct:
    case ReduceOp::kAvg:
      return dtype != DType::kBool;
  }
  return false;
}

}  // namespace

Rows rows_of(Kind kind, bool at_root, uint64_t n) {
  const uint64_t root = at_root ? 1 : 0;
  switch (kind) {
    case Kind::kBarrier:
      return {0, 0};
    case Kind::kAllReduce:
      return {1, 1};
    case Kind::kBroadcast:
      return {root, 1};
    case Kind::kReduce:
      return {1, root};
    case Kind::kAllGather:
      return {1, n};
    case Kind::kReduceScatter:
      return {n, 1};
    case Kind::kGather:
      return {1, root * n};
    case Kind::kScatter:
      return {root * n, 1};
    case Kind::kAllToAll:
      return {n, n};
    case Kind::kSend:
      return {1, 0};
    case Kind::kRecv:
      return {0, 1};
    case Kind::kMoveResiduals:  // refused before: the leg has none
      return {0, 0};
  }
  return {0, 0};
}

std::string name_of(const Operation& operation) {
  const Descriptor& d = operation.descriptor;
  std::string name = d.kind < kKinds ? kTitles[d.kind] : "operation";
  if (d.label[0] != '\0') name += " (" + std::string(d.label, strnlen(d.label, kLabelBytes)) + ")";
  return name + " of " + (d.comm == 0 ? "world" : "communicator " + std::to_string(d.comm));
}

Status check_operation(Operation* operation, int index, int members) {
  const Descriptor& d = operation->descriptor;
  if (d.kind >= kKinds || d.kind == static_cast<uint8_t>(Kind::kMoveResiduals))
    return refuse(*operation, "kind " + std::to_string(d.kind) + " is unknown");
  if (d.dtype >= kDTypes) return refuse(*operation, "dtype " + std::to_string(d.dtype) + " is unknown");
  const Kind kind = operation->kind();
  if (reduces(kind) && !reducible(operation->dtype(), operation->op())) {
    return refuse(*operation,
                  "reduction " + std::to_string(d.op) + " of dtype " + std::to_string(d.dtype) + " is not supported");
  }
  if (d.count > kMaxCount) return refuse(*operation, "a count of " + std::to_string(d.count));
  if (rooted(kind) && (d.root < 0 || d.root >= members)) {
    return refuse(*operation, "root " + std::to_string(d.root) + " is not one of " + std::to_string(members));
  }
  if ((kind == Kind::kSend || kind == Kind::kRecv) && d.root == index) {
    return refuse(*operation, "the other end is this rank itself");
  }
  const Rows rows = rows_of(kind, d.root == index, static_cast<uint64_t>(members));
  operation->src_bytes = rows.src * d.count * element_bytes(operation->dtype());
  operation->dst_bytes = rows.dst * d.count * element_bytes(operation->dtype());
  if (operation->src_bytes > 0 && operation->src == nullptr) return refuse(*operation, "src is missing");
  if (operation->dst_bytes > 0 && operation->dst == nullptr) return refuse(*operation, "dst is missing");
  if (operation->src_bytes == 0) operation->src = nullptr;
  if (operation->dst_bytes == 0) operation->dst = nullptr;
  const uint64_t element = element_bytes(operation->dtype());
  const auto crooked = [element](const void* place) { return reinterpret_cast<uintptr_t>(place) % element != 0; };
  if (crooked(operation->src) || crooked(operation->dst)) {
    return refuse(*operation, "src or dst is not aligned to its elements");
  }
  return check_codec(*operation);
}

}  // namespace bagua::device
