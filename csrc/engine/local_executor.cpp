#include "engine/local_executor.h"

#include <algorithm>
#include <cstring>
#include <thread>

#include "base/clock.h"

namespace bagua {

namespace {

constexpr size_t kInlineBytes = 256 * 1024;          // of all inputs together: less is done before a helper has woken
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

LocalExecutor::LocalExecutor(EngineState* state, RankTable* ranks)
    : state_(state), ranks_(ranks), threads_(thread_count(state->options().threads)), pool_(threads_ - 1) {}

void LocalExecutor::run(const Communicator& comm, const Collective& operation) {
  state_->busy().start(operation.started_ns);
  const collective::Request request = request_of(operation);
  const collective::Memory memory = memory_of(operation);
  // Blocks small enough that all threads end together, and large enough that handing them out costs nothing.
  const size_t share = operation.first().bytes() / static_cast<size_t>(threads_ * 4);
  const size_t block = std::clamp(share, kSmallestBlock, kLargestBlock);
  const collective::Program program = collective::compile(comm.topology(), request, block);
  const size_t inputs = input_bytes(operation);
  const bool streaming = inputs >= kStreamingBytes;
  const auto step = [&](size_t i) {
    collective::run_step(program, program.steps[i], request, comm.size(), memory, streaming);
  };
  // With one host no step waits for another.
  if (inputs < kInlineBytes) {
    for (size_t i = 0; i < program.steps.size(); ++i) step(i);
  } else {
    pool_.run(program.steps.size(), step);
  }
  Counters& counters = state_->counters();
  counters.bytes_local.fetch_add(inputs, std::memory_order_relaxed);
  counters.ops.fetch_add(1, std::memory_order_relaxed);
  state_->busy().stop(now_ns(), &counters.comm_ns);
  for (const Operation& part : operation.parts) ranks_->complete(part, operation.started_ns, true);
}

void LocalExecutor::run(const Pair& pair) {
  const int64_t started = now_ns();
  state_->busy().start(started);
  const size_t bytes = pair.send.bytes();
  if (bytes > 0) memcpy(pair.recv.dst, pair.send.src, bytes);
  Counters& counters = state_->counters();
  counters.bytes_local.fetch_add(bytes, std::memory_order_relaxed);
  counters.ops.fetch_add(1, std::memory_order_relaxed);
  state_->busy().stop(now_ns(), &counters.comm_ns);
  ranks_->complete(pair.send, started, true);
  ranks_->complete(pair.recv, started, true);
}

}  // namespace bagua
