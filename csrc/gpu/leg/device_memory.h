// Device memory of a communicator: scratch that only grows, and residuals of error feedback.
//
// Thread safety: one thread at a time (Communicator::mutex_).
#pragma once

#include <map>
#include <vector>

#include "gpu/leg/runtime.h"

namespace bagua::device {

class DeviceMemory {
 public:
  explicit DeviceMemory(Runtime* runtime) : runtime_(runtime) {}
  ~DeviceMemory();  // nothing on the device uses it any more
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  // Room number `which`, at least `bytes`, used on one stream only. What was there before may be lost; earlier work
  // that still uses it keeps its memory.
  Status scratch(int which, uint64_t bytes, char** out);
  // `count` float32, zeros on first use. kInvalid if the number stands for another count.
  Status residual(uint32_t number, uint64_t count, CudaStream stream, float** out);

 private:
  struct Block {
    void* data = nullptr;
    uint64_t bytes = 0;
  };

  Runtime* const runtime_;
  std::map<int, Block> rooms_;
  std::map<uint32_t, Block> residuals_;
  std::vector<Block> outgrown_;
};

}  // namespace bagua::device
