// Makes spans of a trace out of collectives and their steps.
//
// Thread safety: pure, but note_operation(), which any thread may call.
#pragma once

#include "collective/program.h"
#include "engine/local/operation.h"
#include "engine/values/trace.h"

namespace bagua {

TraceSpan span_of(const Collective& operation, uint32_t comm, const char* phase, int64_t begin_ns, int64_t end_ns);
// Its "operation" span, and inside it "ranks": from the first local rank's submission to the last one's.
void note_operation(Trace* trace, const Collective& operation, uint32_t comm, int64_t done_ns);
const char* step_phase(const collective::Step& step);

}  // namespace bagua
