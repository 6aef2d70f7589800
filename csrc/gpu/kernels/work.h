// Arguments of the kernels of bagua_kernels_transcode(), passed by value: 0.3 KiB in the constant bank.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "codec/codec.h"
#include "gpu/kernels/kernels.h"
#include "gpu/kernels/launch.h"

namespace bagua::cuda {

constexpr int kMostDecoded = 4;

struct Work {
  const void* inputs[BAGUA_KERNELS_MOST_INPUTS];  // raw ones first
  float* decoded[kMostDecoded];
  float* residual;
  uint8_t* message;
  uint64_t count;
  uint64_t parameters_at;  // offset in a message, in bytes; top-k: offset of the positions
  int32_t raws;
  int32_t input_count;
  int32_t decodeds;
  float scale;
  uint32_t density;
  bool scaled;   // scale is not 1, or there is a residual
  bool aligned;  // all pointers are aligned to 16 bytes
};

// Each launches one kernel on the current device. The caller has checked the arguments.
cudaError_t launch_units(Codec codec, const Work& work, On on);  // all other codecs
cudaError_t launch_signs(Codec codec, const Work& work, On on);  // kSign1, kInt2
cudaError_t launch_top_k(const Work& work, On on);

// Launches the kernel of `codec`.
cudaError_t launch_codec(Codec codec, const Work& work, On on);

}  // namespace bagua::cuda
