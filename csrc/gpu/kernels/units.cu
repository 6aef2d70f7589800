// The kernels of all codecs but onebit, int2 and topk: one warp handles 512 elements at a time.
//
// Memory traffic in bytes per element: 4 for each raw source and output, 8 for a residual, and for the message and each
// encoded source the codec's size: none 4, fp16 and bf16 2, fp8 1.008, minmax8 1.016, int4 0.531. Target: 85 % of the
// bandwidth of a copy. Each of the 32 warps of a multiprocessor has 2 KiB of a float source in flight, together 64 KiB.
// An H100 needs about 15 KiB (3.35 TB/s for 600 ns on 132 multiprocessors), a B200 about 43 KiB.
#include "codec/formats.h"
#include "gpu/kernels/float_units.h"
#include "gpu/kernels/fp8_units.h"
#include "gpu/kernels/launch.h"
#include "gpu/kernels/level_units.h"

namespace bagua::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerMultiprocessor = 4;  // at most 64 registers for a thread

template <class C, Access access>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    transcode_units(const __grid_constant__ Work work) {
  const uint64_t whole = work.count / kUnit;
  const uint64_t step = warps_of_grid();
  for (uint64_t number = warp_of_grid(); number < whole; number += step) {
    transcode_unit<C, access>(work, Unit{number, kUnit, lane_of_thread()});
  }
}

// One warp handles an incomplete unit. It is a separate kernel to save registers in the other one.
template <class C>
__global__ void __launch_bounds__(32) transcode_last_unit(const __grid_constant__ Work work) {
  const auto left = static_cast<uint32_t>(work.count % kUnit);
  transcode_unit<C, Access::kPartial>(work, Unit{work.count / kUnit, left, lane_of_thread()});
}

template <class C>
cudaError_t launch_unit_codec(const Work& work, On on) {
  const uint64_t whole = work.count / kUnit;
  if (whole != 0) {
    const auto kernel = work.aligned ? transcode_units<C, Access::kWide> : transcode_units<C, Access::kSingle>;
    const uint64_t blocks = codec::blocks_of(whole, kThreads / 32);
    const cudaError_t error = launch(kernel, work, blocks, kBlocksPerMultiprocessor, kThreads, 0, on);
    if (error != cudaSuccess) return error;
  }
  if (work.count % kUnit == 0) return cudaSuccess;
  return launch(transcode_last_unit<C>, work, 1, 1, 32, 0, on);
}

}  // namespace

cudaError_t launch_units(Codec codec, const Work& work, On on) {
  switch (codec) {
    case Codec::kNone:
      return launch_unit_codec<Plain>(work, on);
    case Codec::kF16:
      return launch_unit_codec<Sixteen<Half>>(work, on);
    case Codec::kBF16:
      return launch_unit_codec<Sixteen<BFloat16>>(work, on);
    case Codec::kE4M3:
      return launch_unit_codec<E4M3>(work, on);
    case Codec::kE5M2:
      return launch_unit_codec<E5M2>(work, on);
    case Codec::kMinMax8:
      return launch_unit_codec<MinMax>(work, on);
    case Codec::kInt4:
      return launch_unit_codec<Int4>(work, on);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace bagua::cuda
