#include "gpu/leg/operation_table.h"

namespace bagua::device {

OperationTable::~OperationTable() {
  for (auto& operation : all_) {
    runtime_->put_event(operation->end);
    runtime_->put_event(operation->begun);
  }
}

Status OperationTable::take(Operation** out) {
  const Lock lock(mutex_);
  if (free_.empty()) {
    if (all_.size() >= kSlots) {
      return {Code::kResource, std::to_string(kSlots) + " operations were submitted and never released"};
    }
    auto made = std::make_unique<Operation>();
    if (Status status = runtime_->take_event(&made->end); !status) return status;
    free_.push_back(all_.size());
    all_.push_back(std::move(made));
    uses_.push_back(0);
  }
  const size_t slot = free_.back();
  free_.pop_back();
  Operation* const operation = all_[slot].get();
  operation->ticket = ++uses_[slot] * kSlots + slot;
  operation->retired = operation->released = false;
  operation->descriptor = Descriptor{};
  operation->staged = nullptr;
  operation->started_ns = operation->done_ns = operation->awaited_ns = 0;
  runtime_->counters.in_flight.fetch_add(1);
  *out = operation;
  return Status::ok();
}

Operation* OperationTable::find(uint64_t ticket) {
  const Lock lock(mutex_);
  const size_t slot = ticket % kSlots;
  if (slot >= all_.size() || all_[slot]->ticket != ticket || all_[slot]->released) return nullptr;
  return all_[slot].get();
}

void OperationTable::release(uint64_t ticket) {
  const Lock lock(mutex_);
  const size_t slot = ticket % kSlots;
  if (slot >= all_.size() || all_[slot]->ticket != ticket || all_[slot]->released) return;
  all_[slot]->released = true;
  give_back(all_[slot].get());
}

void OperationTable::retire(Operation* operation) {
  const Lock lock(mutex_);
  operation->retired = true;
  give_back(operation);
}

void OperationTable::give_back(Operation* operation) {
  if (!operation->retired || !operation->released) return;
  const size_t slot = operation->ticket % kSlots;
  operation->ticket = 0;
  free_.push_back(slot);
  runtime_->counters.in_flight.fetch_sub(1);
}

}  // namespace bagua::device
