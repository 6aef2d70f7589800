// bagua_kernels_load(): loads every kernel, by going through calls that would launch all of them.
#include "gpu/kernels/kernels.h"
#include "gpu/kernels/reduce.h"
#include "gpu/kernels/work.h"

namespace bagua::cuda {
namespace {

// One element more than the largest block of a codec, so that there are complete blocks and an incomplete one.
constexpr uint64_t kCount = 16384 + 1;

cudaError_t load_codecs() {
  for (int codec = 0; codec < kCodecs; ++codec) {
    for (const bool aligned : {true, false}) {
      Work work{};
      work.count = kCount;
      work.aligned = aligned;
      const cudaError_t error = launch_codec(static_cast<Codec>(codec), work, {nullptr, true});
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

}  // namespace
}  // namespace bagua::cuda

BAGUA_EXPORT int bagua_kernels_load(void) {
  const cudaError_t error = bagua::cuda::load_codecs();
  return error != cudaSuccess ? error : bagua::cuda::load_reductions();
}
