#include "gpu/leg/device_memory.h"

#include <algorithm>

namespace bagua::device {

DeviceMemory::~DeviceMemory() {
  OnDevice here(*runtime_);
  const auto free = [this](const Block& block, std::atomic<uint64_t>* total) {
    runtime_->libraries.cuda.release(block.data);
    total->fetch_sub(block.bytes);
  };
  for (const auto& [which, block] : rooms_) free(block, &runtime_->counters.scratch_bytes);
  for (const Block& block : outgrown_) free(block, &runtime_->counters.scratch_bytes);
  for (const auto& [number, block] : residuals_) free(block, &runtime_->counters.residual_bytes);
}

Status DeviceMemory::scratch(int which, uint64_t bytes, char** out) {
  Block& room = rooms_[which];
  if (room.bytes < bytes) {
    Block larger;
    larger.bytes = std::max(bytes, room.bytes + room.bytes / 2);
    if (Status status = runtime_->allocate(larger.bytes, &larger.data, &runtime_->counters.scratch_bytes); !status) {
      return status;
    }
    if (room.data != nullptr) outgrown_.push_back(room);
    room = larger;
  }
  *out = static_cast<char*>(room.data);
  return Status::ok();
}

Status DeviceMemory::residual(uint32_t number, uint64_t count, CudaStream stream, float** out) {
  const auto found = residuals_.find(number);
  if (found != residuals_.end()) {
    if (found->second.bytes != count * sizeof(float)) {
      return {Code::kInvalid, "residual " + std::to_string(number) + " belongs to a vector of " +
                                  std::to_string(found->second.bytes / sizeof(float)) + " elements, not " +
                                  std::to_string(count)};
    }
    *out = static_cast<float*>(found->second.data);
    return Status::ok();
  }
  Block made;
  made.bytes = count * sizeof(float);
  Status status = runtime_->allocate(made.bytes, &made.data, &runtime_->counters.residual_bytes);
  if (!status) return status;
  residuals_[number] = made;
  *out = static_cast<float*>(made.data);
  return runtime_->cuda(runtime_->libraries.cuda.set(made.data, 0, made.bytes, stream), "clearing a residual");
}

}  // namespace bagua::device
