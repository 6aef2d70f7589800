#include "device/carried.h"

#include <algorithm>

#include "base/clock.h"

namespace bagua::device {

Carried::Carried(Runtime* runtime, OperationTable* table, std::string members)
    : runtime_(runtime),
      table_(table),
      members_(std::move(members)),
      waits_(runtime->waits.add([this] { return look(); })) {}

Carried::~Carried() {
  runtime_->waits.remove(waits_);
}

Status Carried::begin(Operation* operation) {
  std::lock_guard<std::mutex> lock(mutex_);
  settle();
  if (operation->begun == nullptr) {
    if (Status status = runtime_->take_event(&operation->begun); !status) return status;
  }
  queue_.push_back({operation, false, 0});
  return Status::ok();
}

void Carried::enqueued(Operation* operation, bool ok) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = std::find_if(queue_.begin(), queue_.end(),
                                  [operation](const Entry& entry) { return entry.operation == operation; });
  if (found != queue_.end()) found->enqueued = true;
  if (ok) return;
  if (found != queue_.end()) queue_.erase(found);
  table_->retire(operation);
}

// Under mutex_. Ends come in the order of operations.
void Carried::settle() {
  const CudaRuntime& cuda = runtime_->libraries.cuda;
  while (!queue_.empty() && queue_.front().enqueued &&
         cuda.event_query(queue_.front().operation->end) != kCudaNotReady) {
    table_->retire(queue_.front().operation);
    queue_.pop_front();
  }
}

void Carried::clear() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const Entry& entry : queue_) table_->retire(entry.operation);
  queue_.clear();
}

// The first one holds up those behind it. CUDA says that it has begun only when it is asked, which the watcher does
// every now and then.
Waiting Carried::look() {
  std::lock_guard<std::mutex> lock(mutex_);
  settle();
  if (queue_.empty() || !queue_.front().enqueued) return {};
  Entry& first = queue_.front();
  if (first.begun_ns == 0 && runtime_->libraries.cuda.event_query(first.operation->begun) != kCudaNotReady) {
    first.begun_ns = now_ns();
  }
  if (first.begun_ns == 0) return {};
  int64_t awaited = 0;
  for (const Entry& entry : queue_) {
    const int64_t one = entry.operation->awaited_ns.load(std::memory_order_relaxed);
    if (one != 0 && (awaited == 0 || one < awaited)) awaited = one;
  }
  if (awaited == 0) return {};
  return {std::max(first.begun_ns, awaited), "NCCL has not ended " + name_of(*first.operation) + " between ranks " +
                                                 members_ + ": one of them has not come."};
}

}  // namespace bagua::device
