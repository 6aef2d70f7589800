// Device memory of a communicator: scratch buffers that only grow, and residuals of error feedback.
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
  ~DeviceMemory();  // the device must not use the memory any more
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  // Scratch buffer number `which`, of at least `bytes`; use it on one stream only. Its content is undefined. Earlier
  // work that still uses a smaller buffer keeps that one.
  Status scratch(int which, uint64_t bytes, char** out);
  // `count` float32 values, zero on first use. kInvalid if `number` was used with another count.
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
