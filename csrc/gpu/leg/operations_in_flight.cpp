#include "gpu/leg/operations_in_flight.h"

#include <algorithm>

#include "base/clock.h"

namespace bagua::device {

OperationsInFlight::OperationsInFlight(Runtime* runtime, OperationTable* table, std::string members)
    : runtime_(runtime), table_(table), members_(std::move(members)) {
  wait_id_ = runtime_->wait_clock.add([this] { return look(); });
  poll_id_ = runtime->poller.add([this] { settle(); });
}

OperationsInFlight::~OperationsInFlight() {
  static_cast<void>(clear());
}

Status OperationsInFlight::begin(Operation* operation) {
  settle();
  if (operation->begun == nullptr) {
    if (Status status = runtime_->take_event(&operation->begun); !status) return status;
  }
  const Lock lock(mutex_);
  queue_.push_back({operation, false, 0});
  return Status::ok();
}

void OperationsInFlight::enqueued(Operation* operation, bool ok) {
  const Lock lock(mutex_);
  const auto found = std::find_if(queue_.begin(), queue_.end(),
                                  [operation](const Entry& entry) { return entry.operation == operation; });
  if (found != queue_.end()) found->enqueued = true;
  if (ok) return;
  if (found != queue_.end()) queue_.erase(found);
  table_->retire(operation);
}

// Returns the oldest operation that is enqueued. Only settle() removes it.
bool OperationsInFlight::first(Entry* out) {
  const Lock lock(mutex_);
  if (queue_.empty() || !queue_.front().enqueued) return false;
  *out = queue_.front();
  return true;
}

// Retires operations that have ended; they end in their order. The beginning of an operation must be polled, too.
void OperationsInFlight::settle() {
  if (!settling_.try_lock()) return;
  const Lock alone(settling_, std::adopt_lock);
  const CudaRuntime& cuda = runtime_->libraries.cuda;
  Entry entry{};
  while (first(&entry)) {
    const bool over = cuda.event_query(entry.operation->end) != kCudaNotReady;
    const bool begun = over || entry.begun_ns != 0 || cuda.event_query(entry.operation->begun) != kCudaNotReady;
    if (over) entry.operation->seen_done(now_ns());
    {
      const Lock lock(mutex_);
      if (begun && entry.begun_ns == 0) queue_.front().begun_ns = now_ns();
      if (over) queue_.pop_front();
    }
    if (!over) return;
    table_->retire(entry.operation);
  }
}

bool OperationsInFlight::clear() {
  if (wait_id_ != 0) runtime_->wait_clock.remove(wait_id_);
  wait_id_ = 0;
  if (poll_id_ != 0 && !runtime_->poller.remove(poll_id_)) return false;
  poll_id_ = 0;
  const Lock lock(mutex_);
  for (const Entry& entry : queue_) table_->retire(entry.operation);
  queue_.clear();
  return true;
}

// Only the oldest operation matters: the others wait for it.
Waiting OperationsInFlight::look() {
  const Lock lock(mutex_);
  if (queue_.empty() || queue_.front().begun_ns == 0) return {};
  const Entry& first = queue_.front();
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
