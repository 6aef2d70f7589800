#include "gpu/leg/operation.h"

#include <cstring>

#include "codec/codec.h"

namespace bagua::device {

namespace {

constexpr uint64_t kMaxCount = uint64_t{1} << 44;

Status refuse(const Operation& operation, const std::string& what) {
  return {Code::kInvalid, name_of(operation) + ": " + what};
}

Status check_codec(const Operation& operation) {
  const Descriptor& d = operation.descriptor;
  const bool any = d.density != 0 || d.residual != 0 || d.exact != 0;
  if (d.codec == 0) {
    return any ? refuse(operation, "density, residual and exact need a codec") : Status::ok();
  }
  if (d.codec >= kCodecs) return refuse(operation, "codec " + std::to_string(d.codec) + " is unknown");
  if (!encoding_known(d.codec, d.density)) {
    return refuse(operation, "topk takes a density of 1 to 65535 (of 65536 elements), other codecs 0");
  }
  if (operation.kind() != Kind::kAllReduce || operation.dtype() != DType::kF32 ||
      (operation.op() != ReduceOp::kSum && operation.op() != ReduceOp::kAvg)) {
    return refuse(operation, "codecs take all-reduce of float32 with SUM or AVG");
  }
  if (d.exact > d.count) return refuse(operation, "more exact elements than elements");
  return Status::ok();
}

}  // namespace

std::string name_of(const Operation& operation) {
  const Descriptor& d = operation.descriptor;
  std::string name = kind_known(d.kind) ? kind_title(operation.kind()) : "operation";
  if (d.label[0] != '\0') name += " (" + std::string(d.label, strnlen(d.label, kLabelBytes)) + ")";
  return name + " of " + (d.comm == 0 ? "world" : "communicator " + std::to_string(d.comm));
}

Status check_operation(Operation* operation, int index, int members) {
  const Descriptor& d = operation->descriptor;
  if (!kind_known(d.kind) || d.kind == static_cast<uint8_t>(Kind::kMoveResiduals))
    return refuse(*operation, "kind " + std::to_string(d.kind) + " is unknown");
  if (d.dtype >= kDTypes) return refuse(*operation, "dtype " + std::to_string(d.dtype) + " is unknown");
  const Kind kind = operation->kind();
  if (kind_reduces(kind) && !op_supported(operation->dtype(), operation->op())) {
    return refuse(*operation, std::string(op_name(operation->op())) + " of " + dtype_name(operation->dtype()) +
                                  " is not supported");
  }
  if (d.count > kMaxCount) return refuse(*operation, "a count of " + std::to_string(d.count));
  if (kind_rooted(kind) && (d.root < 0 || d.root >= members)) {
    return refuse(*operation, "root " + std::to_string(d.root) + " is not one of " + std::to_string(members));
  }
  if ((kind == Kind::kSend || kind == Kind::kRecv) && d.root == index) {
    return refuse(*operation, "the other end is this rank itself");
  }
  const Extent blocks = blocks_of(kind, d.root == index, static_cast<uint64_t>(members));
  const uint64_t element = dtype_size(operation->dtype());
  operation->src_bytes = blocks.src * d.count * element;
  operation->dst_bytes = blocks.dst * d.count * element;
  if (operation->src_bytes > 0 && operation->src == nullptr) return refuse(*operation, "src is missing");
  if (operation->dst_bytes > 0 && operation->dst == nullptr) return refuse(*operation, "dst is missing");
  if (operation->src_bytes == 0) operation->src = nullptr;
  if (operation->dst_bytes == 0) operation->dst = nullptr;
  const auto crooked = [element](const void* place) { return reinterpret_cast<uintptr_t>(place) % element != 0; };
  if (crooked(operation->src) || crooked(operation->dst)) {
    return refuse(*operation, "src or dst is not aligned to its elements");
  }
  return check_codec(*operation);
}

}  // namespace bagua::device
