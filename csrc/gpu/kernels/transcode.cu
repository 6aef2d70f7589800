// bagua_kernels_transcode(): checks the arguments and launches the codec's kernel.
#include "codec/formats.h"
#include "gpu/kernels/kernels.h"
#include "gpu/kernels/work.h"

namespace bagua::cuda {
namespace {

bool aligned_to(const void* pointer, uintptr_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

// Offset of the parameters of a message, or of the positions of a top-k message.
uint64_t parameters_at(const BaguaTranscode& work) {
  const uint64_t count = work.count;
  switch (static_cast<Codec>(work.codec)) {
    case Codec::kE4M3:
    case Codec::kE5M2:
    case Codec::kMinMax8:
      return codec::aligned4(count);
    case Codec::kInt4:
      return codec::aligned4(count / 2 + count % 2);
    case Codec::kSign1:
      return codec::aligned4(count / 8 + (count % 8 != 0 ? 1 : 0));
    case Codec::kInt2:
      return codec::blocks_of(count, codec::kWordElements) * 8;
    case Codec::kTopK:
      return codec::kept_of_all(count, work.density) * sizeof(float);
    default:
      return 0;
  }
}

bool known(const BaguaTranscode& work) {
  return encoding_known(work.codec, work.density) && work.raws >= 0 && work.encodeds >= 0 && work.decodeds >= 0 &&
         work.raws <= BAGUA_KERNELS_MOST_INPUTS && work.encodeds <= BAGUA_KERNELS_MOST_INPUTS - work.raws &&
         work.decodeds <= kMostDecoded;
}

// Copies the pointers. False: one is null or not aligned to 4 bytes. Clears `aligned` if one is not aligned to 16.
template <class To, class From>
bool take(const From* from, int count, To* to, bool& aligned) {
  for (int k = 0; k < count; ++k) {
    if (from[k] == nullptr || !aligned_to(from[k], 4)) return false;
    aligned = aligned && aligned_to(from[k], 16);
    to[k] = from[k];
  }
  return true;
}

bool prepare(const BaguaTranscode& from, Work& work) {
  work.count = from.count;
  work.parameters_at = parameters_at(from);
  work.raws = from.raws;
  work.input_count = from.raws + from.encodeds;
  work.decodeds = from.decodeds;
  work.scale = from.scale;
  work.density = from.density;
  work.scaled = from.scale != 1.0f || from.residual != nullptr;
  work.residual = from.residual;
  work.message = static_cast<uint8_t*>(from.message);
  work.aligned = aligned_to(from.residual, 16) && aligned_to(from.message, 16);
  // Without a message the residual is added, but not updated.
  return aligned_to(from.residual, 4) && aligned_to(from.message, 4) &&
         take(from.raw, from.raws, work.inputs, work.aligned) &&
         take(from.encoded, from.encodeds, work.inputs + from.raws, work.aligned) &&
         take(from.decoded, from.decodeds, work.decoded, work.aligned);
}

}  // namespace

cudaError_t launch_codec(Codec codec, const Work& work, On on) {
  if (codec == Codec::kSign1 || codec == Codec::kInt2) return launch_signs(codec, work, on);
  if (codec == Codec::kTopK) return launch_top_k(work, on);
  return launch_units(codec, work, on);
}

}  // namespace bagua::cuda

BAGUA_EXPORT uint32_t bagua_kernels_version(void) {
  return BAGUA_KERNELS_VERSION;
}

BAGUA_EXPORT int bagua_kernels_transcode(const BaguaTranscode* from, void* on) {
  using namespace bagua::cuda;
  if (!known(*from)) return cudaErrorInvalidValue;
  if (from->count == 0) return cudaSuccess;
  Work work{};
  if (!prepare(*from, work)) return cudaErrorInvalidValue;
  return launch_codec(static_cast<bagua::Codec>(from->codec), work, {static_cast<cudaStream_t>(on)});
}
