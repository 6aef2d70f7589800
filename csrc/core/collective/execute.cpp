#include "collective/execute.h"

#include <algorithm>
#include <cstring>

namespace bagua::collective {

const char* source_of(const Memory& memory, const Ref& ref) {
  switch (ref.space) {
    case Space::kSrc:
      return memory.src[ref.member] + ref.offset;
    case Space::kDst:
      return memory.dst[ref.member] + ref.offset;
    case Space::kResidual:
      return (memory.carried != nullptr ? memory.carried : memory.residual) + ref.offset;
    case Space::kScratch:
      break;
  }
  return memory.scratch + ref.offset;
}

char* target_of(const Memory& memory, const Ref& ref) {
  if (ref.space == Space::kResidual) return memory.residual + ref.offset;
  return ref.space == Space::kDst ? memory.dst[ref.member] + ref.offset : memory.scratch + ref.offset;
}

namespace {

void run_transcode(const Step& step, const Ref* refs, const Request& request, int64_t divisor, const Memory& memory) {
  Transcode work;
  for (uint32_t i = 0; i < step.sources; ++i) {
    work.raw.push_back(reinterpret_cast<const float*>(source_of(memory, *refs++)));
  }
  for (uint32_t i = 0; i < step.encoded; ++i) work.encoded.push_back(source_of(memory, *refs++));
  if (step.residual) {
    work.carried = reinterpret_cast<const float*>(source_of(memory, *refs));
    work.residual = reinterpret_cast<float*>(target_of(memory, *refs++));
  }
  if (step.message) work.message = target_of(memory, *refs++);
  for (uint32_t i = 0; i < step.destinations; ++i) {
    work.decoded.push_back(reinterpret_cast<float*>(target_of(memory, *refs++)));
  }
  work.encoding = request.encoding;
  work.count = step.bytes / sizeof(float);
  if (step.final && request.op == ReduceOp::kAvg) work.scale = 1.0f / static_cast<float>(divisor);
  transcode(work);
}

}  // namespace

void run_step(const Program& program, const Step& step, const Request& request, int64_t divisor, const Memory& memory,
              bool streaming) {
  const Ref* refs = program.refs.data() + step.first_ref;
  if (step.type == Step::Type::kCopy) {
    const char* from = source_of(memory, refs[0]);
    for (uint32_t i = 0; i < step.destinations; ++i) {
      char* to = target_of(memory, refs[1 + i]);
      if (to != from) memcpy(to, from, step.bytes);
    }
    return;
  }
  if (step.type == Step::Type::kTranscode) return run_transcode(step, refs, request, divisor, memory);
  std::vector<const void*> from;
  std::vector<void*> to;
  for (uint32_t i = 0; i < step.sources; ++i) from.push_back(source_of(memory, refs[i]));
  for (uint32_t i = 0; i < step.destinations; ++i) to.push_back(target_of(memory, refs[step.sources + i]));
  // A partial result is sent to other hosts. The mean divides only once, in the final step.
  const ReduceOp op = request.op == ReduceOp::kAvg && !step.final ? ReduceOp::kSum : request.op;
  const bool aliased = std::any_of(to.begin(), to.end(), [&from](const void* target) {
    return std::find(from.begin(), from.end(), target) != from.end();
  });
  reduce(request.dtype, op, from.data(), static_cast<int>(from.size()), to.data(), static_cast<int>(to.size()),
         step.bytes / dtype_size(request.dtype), divisor, streaming && !aliased);
}

}  // namespace bagua::collective
