#include "engine/local/operation.h"

#include <algorithm>
#include <tuple>

#include "base/text.h"
#include "codec/codec.h"
#include "engine/local/ranks.h"

namespace bagua {

namespace {

std::string codec_text(uint8_t codec) {
  return "codec " + (codec < kCodecs ? std::string(codec_name(static_cast<Codec>(codec))) : std::to_string(codec));
}

constexpr uint64_t kMaxCount = uint64_t{1} << 44;  // times 8 bytes times kMaxMembers stays far below 2^64

Status refuse(const Operation& operation, const std::string& what) {
  const Descriptor& d = operation.descriptor;
  const std::string name = kind_known(d.kind) ? kind_title(operation.kind()) : "operation";
  const std::string label = label_of(d);
  return {Code::kInvalid, name + " of " + comm_name(d.comm) + (label.empty() ? "" : " (" + label + ")") + ": rank " +
                              std::to_string(operation.rank) + " passed " + what + " [BG501]"};
}

// How the operation asks to cross between hosts.
Status check_encoding(const Operation& operation) {
  const Descriptor& d = operation.descriptor;
  const std::string codec = codec_text(d.codec);
  if (d.codec == 0) {
    if (d.density != 0) return refuse(operation, "density " + std::to_string(d.density) + " without a codec");
    if (d.residual != 0) return refuse(operation, "residual " + std::to_string(d.residual) + " without a codec");
    if (d.residual_sides != 0) return refuse(operation, "sides of a residual without a codec");
    if (d.exact != 0) return refuse(operation, std::to_string(d.exact) + " exact elements without a codec");
    return Status::ok();
  }
  if (d.codec >= kCodecs) return refuse(operation, codec + ", which is unknown");
  if (!encoding_known(d.codec, d.density)) {
    return refuse(operation, codec + " with density " + std::to_string(d.density) +
                                 "; topk takes 1 to 65535 (of 65536 elements), the others 0");
  }
  if (operation.kind() != Kind::kAllReduce) return refuse(operation, codec + "; only all-reduce takes a codec");
  if (operation.dtype() != DType::kF32) {
    return refuse(operation, codec + " for " + dtype_name(operation.dtype()) + "; codecs take float32");
  }
  if (operation.op() != ReduceOp::kSum && operation.op() != ReduceOp::kAvg) {
    return refuse(operation, codec + " for " + op_name(operation.op()) + "; codecs take SUM and AVG");
  }
  if (d.residual_sides >= kResidualSides || (d.residual_sides != 0 && d.residual == 0)) {
    return refuse(operation,
                  "sides " + std::to_string(d.residual_sides) + " of residual " + std::to_string(d.residual));
  }
  if (d.exact > d.count) {
    return refuse(operation, std::to_string(d.exact) + " exact elements of a vector of " + std::to_string(d.count));
  }
  return Status::ok();
}

Status check_numbers(const Operation& operation, int size) {
  const Descriptor& d = operation.descriptor;
  if (!kind_known(d.kind)) return refuse(operation, "kind " + std::to_string(d.kind) + ", which is unknown");
  const Kind kind = operation.kind();
  if (d.dtype >= kDTypes) return refuse(operation, "dtype " + std::to_string(d.dtype) + ", which is unknown");
  if (kind_reduces(kind)) {
    if (!op_known(d.op)) return refuse(operation, "reduction " + std::to_string(d.op) + ", which is unknown");
    if (!op_supported(operation.dtype(), operation.op())) {
      return refuse(operation, std::string(op_name(operation.op())) + " of " + dtype_name(operation.dtype()) +
                                   ", which is not supported");
    }
  }
  if (d.count > kMaxCount) return refuse(operation, "a count of " + std::to_string(d.count));
  const bool from_any = kind == Kind::kRecv && d.root == kAnySource;
  if (kind_rooted(kind) && !from_any && (d.root < 0 || d.root >= size)) {
    return refuse(operation, "root " + std::to_string(d.root) + "; it must be 0 to " + std::to_string(size - 1));
  }
  if ((kind == Kind::kSend || kind == Kind::kRecv) && d.root == operation.index) {
    return refuse(operation, "itself as the other end");
  }
  if (d.tag != 0 && kind != Kind::kSend && kind != Kind::kRecv) {
    return refuse(operation, "tag " + std::to_string(d.tag) + "; only sends and receives take one");
  }
  if (d.fenced > 1 || (d.fenced != 0 && (kind == Kind::kSend || kind == Kind::kRecv))) {
    return refuse(operation, "fenced " + std::to_string(d.fenced) + "; it is 0, or 1 for a collective");
  }
  if (d.chunk_kib != 0 && kind != Kind::kAllReduce) {
    return refuse(operation, "chunks of " + std::to_string(d.chunk_kib) + " KiB; only all-reduce takes them");
  }
  if (kind == Kind::kMoveResiduals &&
      (operation.dtype() != DType::kI64 || d.count % kResidualMoveWords != 0 || d.fenced == 0)) {
    return refuse(operation, "a table that is none: it must be fenced, and rows of " +
                                 std::to_string(kResidualMoveWords) + " int64");
  }
  return check_encoding(operation);
}

Status find_memory(const Operation& operation, const SegmentTable& segments, const char* side, uint32_t segment,
                   uint64_t offset, uint64_t bytes, std::shared_ptr<Mapping>* memory, char** place) {
  if (bytes == 0) return Status::ok();
  *memory = segments.find(operation.port->member, segment);
  if (*memory == nullptr) {
    return refuse(operation, std::string("segment ") + std::to_string(segment) + " as " + side +
                                 ", which it does not hold (was it freed?)");
  }
  const uint64_t size = (*memory)->bytes();
  if (offset > size || bytes > size - offset) {
    return refuse(operation, std::string(side) + " of " + std::to_string(bytes) + " bytes at offset " +
                                 std::to_string(offset) + " of a segment of " + std::to_string(size) + " bytes");
  }
  if (offset % dtype_size(operation.dtype()) != 0) {
    return refuse(operation,
                  std::string(side) + " at offset " + std::to_string(offset) + ", not a multiple of the element size");
  }
  *place = (*memory)->data() + offset;
  return Status::ok();
}

// Where the small side may lie inside the large one.
bool overlap_allowed(const Operation& operation, uint64_t block) {
  const uint64_t own = static_cast<uint64_t>(operation.index) * block;
  switch (operation.kind()) {
    case Kind::kAllReduce:
    case Kind::kReduce:
    case Kind::kBroadcast:
      return operation.src == operation.dst;
    case Kind::kAllGather:
    case Kind::kGather:
      return operation.src == operation.dst + own;
    case Kind::kReduceScatter:
    case Kind::kScatter:
      return operation.dst == operation.src + own;
    default:
      return false;
  }
}

}  // namespace

Status resolve(Operation* operation, int size, const SegmentTable& segments) {
  if (Status status = check_numbers(*operation, size); !status) return status;
  const Descriptor& d = operation->descriptor;
  const Extent blocks = blocks_of(operation->kind(), d.root == operation->index, static_cast<uint64_t>(size));
  const uint64_t block = operation->bytes(), src_bytes = blocks.src * block, dst_bytes = blocks.dst * block;
  char* src = nullptr;
  Status status =
      find_memory(*operation, segments, "src", d.src_segment, d.src_offset, src_bytes, &operation->src_memory, &src);
  if (!status) return status;
  operation->src = src;
  status = find_memory(*operation, segments, "dst", d.dst_segment, d.dst_offset, dst_bytes, &operation->dst_memory,
                       &operation->dst);
  if (!status) return status;
  const bool overlaps = operation->src != nullptr && operation->dst != nullptr &&
                        operation->src < operation->dst + dst_bytes && operation->dst < operation->src + src_bytes;
  if (overlaps && !overlap_allowed(*operation, block)) {
    return refuse(*operation, "src and dst that overlap in a way this operation can't work in place");
  }
  return Status::ok();
}

bool same_call(const Descriptor& a, const Descriptor& b) {
  const auto call = [](const Descriptor& d) {
    const Kind kind = static_cast<Kind>(d.kind);
    return std::tuple(kind_reduces(kind) ? d.op : 0, kind_rooted(kind) ? d.root : -1,
                      d.residual != 0,  // its number is each rank's own
                      d.dtype, d.count, d.codec, d.density, d.exact, d.residual_sides, d.chunk_kib);
  };
  return a.kind == b.kind && (static_cast<Kind>(a.kind) == Kind::kBarrier || call(a) == call(b));
}

std::string comm_name(uint32_t comm) {
  return comm == 0 ? "world" : "communicator " + std::to_string(comm);
}

std::string label_of(const Descriptor& descriptor) {
  std::string label;
  for (size_t i = 0; i < kLabelBytes && descriptor.label[i] != '\0'; ++i) {
    const unsigned char c = static_cast<unsigned char>(descriptor.label[i]);
    label += c < 0x20 || c == 0x7f ? '?' : static_cast<char>(c);
  }
  // A multi-byte character that was cut at the end would make the whole message undecodable.
  while (!label.empty() && descriptor.label[kLabelBytes - 1] != '\0' &&
         (static_cast<unsigned char>(label.back()) & 0x80)) {
    label.pop_back();
  }
  return label;
}

std::string operation_name(const Descriptor& descriptor, uint64_t sequence) {
  const std::string label = label_of(descriptor);
  return std::string(kind_title(static_cast<Kind>(descriptor.kind))) + " #" + std::to_string(sequence) + " of " +
         comm_name(descriptor.comm) + (label.empty() ? "" : " (" + label + ")");
}

std::string call_text(const Descriptor& d) {
  const Kind kind = static_cast<Kind>(d.kind);
  if (kind == Kind::kBarrier) return "nothing";
  std::string text =
      std::to_string(d.count) + " x " + (d.dtype < kDTypes ? dtype_name(static_cast<DType>(d.dtype)) : "?");
  if (d.ndim > 0) {
    text += " [";
    for (int i = 0; i < std::min<int>(d.ndim, kMaxDims); ++i) text += (i > 0 ? ", " : "") + std::to_string(d.dims[i]);
    text += "]";
  }
  if (kind_reduces(kind)) text += std::string(", ") + (op_known(d.op) ? op_name(static_cast<ReduceOp>(d.op)) : "?");
  if (kind_rooted(kind)) text += ", root " + std::to_string(d.root);
  if (d.tag != 0) text += ", tag " + std::to_string(d.tag);
  if (d.chunk_kib != 0) text += ", chunks of " + std::to_string(d.chunk_kib) + " KiB";
  if (d.codec != 0) {
    text += ", " + codec_text(d.codec);
    if (d.density != 0) text += " of density " + std::to_string(d.density) + "/65536";
    if (d.residual != 0) text += " with error feedback";
    if (d.residual_sides != 0) text += std::string(", side ") + (d.residual_sides == kRead0Write1 ? "0" : "1");
    if (d.exact != 0) text += ", the last " + std::to_string(d.exact) + " exact";
  }
  return text;
}

std::string waits_text(const std::string& operation, int rank, int other, int64_t ns) {
  return operation + ": rank " + std::to_string(rank) + " has been waiting for rank " + std::to_string(other) +
         " for " + duration_text(ns) + "\n";
}

Status check_pair(const Operation& send, const Descriptor& expected, int receiver, uint64_t sequence) {
  const Descriptor& sent = send.descriptor;
  if (sent.count == expected.count && sent.dtype == expected.dtype) return Status::ok();
  return {Code::kInvalid, operation_name(sent, sequence) + ": rank " + std::to_string(send.rank) + " sends " +
                              call_text(sent) + ", rank " + std::to_string(receiver) + " expects " +
                              call_text(expected) + ". Both must pass the same. [BG501]"};
}

std::string mismatch_text(const Descriptor& one, const std::string& who_one, const Descriptor& other,
                          const std::string& who_other, uint64_t sequence) {
  if (one.kind == other.kind) {
    return operation_name(one, sequence) + ": " + who_other + " passed " + call_text(other) + ", " + who_one +
           " passed " + call_text(one) + ". All ranks must pass the same. [BG501]";
  }
  const auto called = [](const Descriptor& d) {
    const std::string label = label_of(d);
    return std::string(kind_title(static_cast<Kind>(d.kind))) + (label.empty() ? "" : " (" + label + ")") + " with " +
           call_text(d);
  };
  return "operation #" + std::to_string(sequence) + " of " + comm_name(one.comm) + ": " + who_other + " called " +
         called(other) + ", " + who_one + " called " + called(one) +
         ". All ranks must call the same operations in the same order. [BG501]";
}

}  // namespace bagua
