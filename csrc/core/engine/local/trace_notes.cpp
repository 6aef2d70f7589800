#include "engine/local/trace_notes.h"

#include <algorithm>
#include <utility>

namespace bagua {

TraceSpan span_of(const Collective& operation, uint32_t comm, const char* phase, int64_t begin_ns, int64_t end_ns) {
  TraceSpan span;
  span.phase = phase;
  span.name = label_of(operation.first().descriptor);
  if (span.name.empty()) span.name = kind_title(operation.first().kind());
  span.comm = comm;
  span.sequence = operation.sequence;
  span.begin_ns = begin_ns;
  span.end_ns = std::max(begin_ns, end_ns);
  return span;
}

void note_operation(Trace* trace, const Collective& operation, uint32_t comm, int64_t done_ns) {
  const auto by_time = [](const Operation& a, const Operation& b) { return a.submitted_ns < b.submitted_ns; };
  const auto [first, last] = std::minmax_element(operation.parts.begin(), operation.parts.end(), by_time);
  TraceSpan span = span_of(operation, comm, "operation", first->submitted_ns, done_ns);
  span.bytes = operation.first().bytes();
  trace->note(std::move(span));
  if (operation.parts.size() < 2) return;
  TraceSpan wait = span_of(operation, comm, "ranks", first->submitted_ns, last->submitted_ns);
  wait.peer = last->rank;
  trace->note(std::move(wait));
}

const char* step_phase(const collective::Step& step) {
  using Type = collective::Step::Type;
  switch (step.type) {
    case Type::kReduce:
      return "reduce";
    case Type::kCopy:
      return "copy";
    case Type::kTranscode:
      return step.message ? "encode" : "decode";
    case Type::kSend:
      return "send";
    case Type::kRecv:
      return "receive";
  }
  return "";
}

}  // namespace bagua
