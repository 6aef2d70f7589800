// The library of kernels on the CPU, with the codecs of the core, in stream order. A call whose kernels were not loaded
// to the device is misuse; FAKE_KERNELS_LOAD=209 lets loading fail, with that code.
#include <atomic>
#include <cstdlib>
#include <vector>

#include "codec/codec.h"
#include "fake_cuda.h"
#include "gpu/kernels/kernels.h"
#include "kernel/reduce.h"

namespace {

struct TranscodeWork {
  BaguaTranscode work;
  std::vector<const float*> raw;
  std::vector<const void*> encoded;
  std::vector<float*> decoded;
};
struct ReduceWork {
  BaguaReduce work;
  std::vector<const void*> inputs;
};

void run_transcode(void* context) {
  auto* const taken = static_cast<TranscodeWork*>(context);
  bagua::Transcode work;
  work.encoding = {static_cast<bagua::Codec>(taken->work.codec), taken->work.density};
  work.count = taken->work.count;
  work.raw = taken->raw;
  work.encoded = taken->encoded;
  work.scale = taken->work.scale;
  work.residual = taken->work.residual;
  work.message = taken->work.message;
  work.decoded = taken->decoded;
  bagua::transcode(work);
  delete taken;
}

void run_reduce(void* context) {
  auto* const taken = static_cast<ReduceWork*>(context);
  const BaguaReduce& w = taken->work;
  bagua::reduce(static_cast<bagua::DType>(w.dtype), static_cast<bagua::ReduceOp>(w.op), taken->inputs.data(),
                w.input_count, &w.output, 1, w.count, w.divisor, false);
  delete taken;
}

constexpr int kInvalid = 1;

std::atomic<uint64_t> loaded{0};  // a bit for each device

uint64_t bit_of_device() {
  int device = 0;
  char bus_id[32];
  fake_cuda_here(&device, bus_id, sizeof(bus_id));
  return uint64_t{1} << device;
}

void check_loaded() {
  if ((loaded & bit_of_device()) == 0)
    fake_cuda_note_misuse("a first launch of a kernel, which may wait for the device");
}

}  // namespace

#define FAKE extern "C" __attribute__((visibility("default")))

FAKE uint32_t bagua_kernels_version(void) {
  return BAGUA_KERNELS_VERSION;
}
FAKE int bagua_kernels_load(void) {
  if (const char* const code = std::getenv("FAKE_KERNELS_LOAD"); code != nullptr) return std::atoi(code);
  loaded |= bit_of_device();
  return 0;
}
FAKE int bagua_kernels_transcode(const BaguaTranscode* work, void* stream) {
  check_loaded();
  if (work->raws + work->encodeds > BAGUA_KERNELS_MOST_INPUTS || work->decodeds > 4) return kInvalid;
  if (reinterpret_cast<uintptr_t>(work->message) % 64 != 0) return kInvalid;
  auto* const taken = new TranscodeWork;
  taken->work = *work;
  taken->raw.assign(work->raw, work->raw + work->raws);
  taken->encoded.assign(work->encoded, work->encoded + work->encodeds);
  taken->decoded.assign(work->decoded, work->decoded + work->decodeds);
  fake_cuda_enqueue(stream, &run_transcode, taken);
  return 0;
}
FAKE int bagua_kernels_reduce(const BaguaReduce* work, void* stream) {
  check_loaded();
  if (work->input_count > BAGUA_KERNELS_MOST_INPUTS) return kInvalid;
  auto* const taken = new ReduceWork;
  taken->work = *work;
  taken->inputs.assign(work->inputs, work->inputs + work->input_count);
  fake_cuda_enqueue(stream, &run_reduce, taken);
  return 0;
}
