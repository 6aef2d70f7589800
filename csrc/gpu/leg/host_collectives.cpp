#include "gpu/leg/host_collectives.h"

#include <cstring>

namespace bagua::device {

HostCollectives::~HostCollectives() {
  HostError ignored;  // an error only means that the daemon and the memory are gone
  if (segment_ != 0) static_cast<void>(runtime_->host.free(runtime_->host.client, segment_, &ignored));
}

Status HostCollectives::room(uint64_t bytes) {
  if (bytes <= bytes_) return Status::ok();
  const HostApi& host = runtime_->host;
  HostError error;
  if (segment_ != 0) static_cast<void>(host.free(host.client, segment_, &error));
  segment_ = bytes_ = 0;
  void* data = nullptr;
  const int code = host.alloc(host.client, bytes, &segment_, &data, &bytes_, &error);
  data_ = static_cast<char*>(data);
  return runtime_->host_status(code, error);
}

Status HostCollectives::run(Descriptor descriptor) {
  const HostApi& host = runtime_->host;
  descriptor.comm = comm_;
  descriptor.root = -1;
  strncpy(descriptor.label, "GPU leg", kLabelBytes - 1);
  const WaitClock::Scope waiting(&runtime_->wait_clock, "");  // the daemon knows which ranks are missing
  HostError error;
  uint64_t ticket = 0;
  if (const int code = host.submit(host.client, &descriptor, &ticket, &error); code != kHostOk) {
    return runtime_->host_status(code, error);
  }
  return runtime_->host_status(host.wait(host.client, ticket, -1, &Failure::interrupts, &runtime_->failure, &error),
                               error);
}

Status HostCollectives::all_gather(const void* mine, void* all, uint64_t bytes, int members) {
  const uint64_t result = (bytes + 63) / 64 * 64, total = bytes * static_cast<uint64_t>(members);
  if (Status status = room(result + total); !status) return status;
  memcpy(data_, mine, bytes);
  Descriptor d{};
  d.kind = static_cast<uint8_t>(Kind::kAllGather);
  d.dtype = static_cast<uint8_t>(DType::kU8);
  d.count = bytes;
  d.src_segment = d.dst_segment = static_cast<uint32_t>(segment_);
  d.dst_offset = result;
  if (Status status = run(d); !status) return status;
  memcpy(all, data_ + result, total);
  return Status::ok();
}

Status HostCollectives::all_max(double* values, uint64_t count) {
  if (Status status = room(count * sizeof(double)); !status) return status;
  memcpy(data_, values, count * sizeof(double));
  Descriptor d{};
  d.kind = static_cast<uint8_t>(Kind::kAllReduce);
  d.dtype = static_cast<uint8_t>(DType::kF64);
  d.op = static_cast<uint8_t>(ReduceOp::kMax);
  d.count = count;
  d.src_segment = d.dst_segment = static_cast<uint32_t>(segment_);
  if (Status status = run(d); !status) return status;
  memcpy(values, data_, count * sizeof(double));
  return Status::ok();
}

}  // namespace bagua::device
