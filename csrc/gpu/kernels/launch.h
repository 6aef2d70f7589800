// Launches kernels; each kernel takes one argument by value.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

// Marks the functions that the library exports; all other symbols are hidden.
#define BAGUA_EXPORT extern "C" __attribute__((visibility("default")))

namespace bagua::cuda {

// Target of a launch.
struct On {
  cudaStream_t stream;
  // Only loads the kernels to the current device, without a launch. Otherwise the first launch would load them, which
  // may wait for all work of the device, and so for other ranks.
  bool load = false;
};

// Launches a block for each part of the work, but at most `per_multiprocessor` blocks for each multiprocessor of the
// current device. Kernels loop over the remaining parts.
template <class Argument>
cudaError_t launch(void (*kernel)(Argument), Argument argument, uint64_t blocks, int per_multiprocessor, int threads,
                   size_t shared_bytes, On on) {
  if (on.load) {
    cudaFuncAttributes ignored;
    return cudaFuncGetAttributes(&ignored, kernel);
  }
  int device = 0;
  int multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  const uint64_t most = static_cast<uint64_t>(multiprocessors) * static_cast<uint64_t>(per_multiprocessor);
  const dim3 grid(static_cast<unsigned>(std::min(blocks, most)));
  void* arguments[] = {&argument};
  return cudaLaunchKernel(kernel, grid, dim3(static_cast<unsigned>(threads)), arguments, shared_bytes, on.stream);
}

}  // namespace bagua::cuda
