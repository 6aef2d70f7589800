#include "engine/local/local_executor.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include "base/clock.h"

namespace bagua {

namespace {

constexpr size_t kInlineBytes = 512 * 1024;          // of all inputs together: less is done before a helper has woken
constexpr size_t kStreamingBytes = 8 * 1024 * 1024;  // of all results together: more would not stay in the cache anyway
constexpr size_t kSmallestBlock = 32 * 1024, kLargestBlock = 512 * 1024;

int thread_count(int wanted) {
  const int cores = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  return wanted > 0 ? std::min(wanted, 64) : std::min(cores, 4);
}

size_t input_bytes(const Collective& operation) {
  size_t bytes = 0;
  for (const Operation& part : operation.parts) {
    if (part.src != nullptr) bytes += part.bytes();
  }
  return bytes;
}

}  // namespace

collective::Request request_of(const Collective& operation) {
  const Operation& one = operation.first();
  return {one.kind(), one.dtype(), one.op(), one.descriptor.count, one.descriptor.root};
}

collective::Memory memory_of(const Collective& operation) {
  collective::Memory memory;
  for (const Operation& part : operation.parts) {
    memory.src.push_back(part.src);
    memory.dst.push_back(part.dst);
  }
  return memory;
}

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

LocalExecutor::LocalExecutor(GenerationState* state)
    : job_(&state->job()), threads_(thread_count(job_->options.threads)), pool_(threads_ - 1) {}

bool continues(const Collective& last, const Collective& next) {
  const Operation& one = last.first();
  const bool by_element =
      one.kind() == Kind::kAllReduce || one.kind() == Kind::kReduce || one.kind() == Kind::kBroadcast;
  Descriptor wanted = one.descriptor;
  wanted.count = next.first().descriptor.count;
  if (!by_element || one.bytes() == 0 || !same_call(wanted, next.first().descriptor)) return false;
  for (size_t i = 0; i < last.parts.size(); ++i) {
    const Operation &before = last.parts[i], &after = next.parts[i];
    if (before.src_memory != after.src_memory || before.dst_memory != after.dst_memory) return false;
    if (before.src != nullptr && before.src + before.bytes() != after.src) return false;
    if (before.dst != nullptr && before.dst + before.bytes() != after.dst) return false;
  }
  return true;
}

void LocalExecutor::run(const Communicator& comm, const std::vector<Collective>& operations) {
  const Collective& first = operations.front();
  const int64_t began = job_->trace.on() ? now_ns() : first.started_ns;
  job_->busy.start(first.started_ns);
  collective::Request request = request_of(first);
  size_t inputs = input_bytes(first);
  for (size_t i = 1; i < operations.size(); ++i) {
    request.count += operations[i].first().descriptor.count;
    inputs += input_bytes(operations[i]);
  }
  const collective::Memory memory = memory_of(first);
  // Blocks small enough that all threads end together, and large enough that handing them out costs nothing.
  const size_t share = request.count * dtype_size(request.dtype) / static_cast<size_t>(threads_ * 4);
  const size_t block = std::clamp(share, kSmallestBlock, kLargestBlock);
  const collective::Program program = collective::compile(comm.topology(), request, block);
  const bool streaming = inputs >= kStreamingBytes;
  const auto step = [&](size_t i) {
    collective::run_step(program, program.steps[i], request, comm.size(), memory, streaming);
  };
  // With one host no step waits for another.
  if (inputs <= kInlineBytes) {
    for (size_t i = 0; i < program.steps.size(); ++i) step(i);
  } else {
    pool_.run(program.steps.size(), step);
  }
  Counters& counters = job_->counters();
  counters.bytes_local.fetch_add(inputs, std::memory_order_relaxed);
  counters.ops.fetch_add(operations.size(), std::memory_order_relaxed);
  const int64_t done = now_ns();
  job_->busy.stop(done, &counters.comm_ns);
  if (job_->trace.on()) {
    for (const Collective& operation : operations) note_operation(&job_->trace, operation, comm.id(), done);
    TraceSpan span = span_of(first, comm.id(), "reduce", began, done);
    span.bytes = inputs;
    job_->trace.note(std::move(span));
  }
  RankTable::complete(operations);
}

void LocalExecutor::run(const Pair& pair) {
  const int64_t started = now_ns();
  job_->busy.start(started);
  const size_t bytes = pair.send.bytes();
  if (bytes > kInlineBytes && threads_ > 1) {
    const size_t block = std::clamp(bytes / static_cast<size_t>(threads_ * 4), kSmallestBlock, kLargestBlock);
    pool_.run((bytes + block - 1) / block, [&](size_t i) {
      const size_t begin = i * block;
      memcpy(pair.recv.dst + begin, pair.send.src + begin, std::min(block, bytes - begin));
    });
  } else if (bytes > 0) {
    memcpy(pair.recv.dst, pair.send.src, bytes);
  }
  Counters& counters = job_->counters();
  counters.bytes_local.fetch_add(bytes, std::memory_order_relaxed);
  counters.ops.fetch_add(1, std::memory_order_relaxed);
  job_->busy.stop(now_ns(), &counters.comm_ns);
  RankTable::complete(pair.send, started, Outcome::kDone);
  RankTable::complete(pair.recv, started, Outcome::kDone);
}

}  // namespace bagua
