#include "engine/residuals.h"

#include <string>

#include "channel/headroom.h"

namespace bagua {

namespace {

// An instance without its incarnation: in a new generation all communicators are the first ones of their kind.
uint64_t first_instance(uint64_t instance) {
  return instance >> 32 << 32;
}

}  // namespace

ResidualTable::~ResidualTable() {
  for (const auto& [number, residual] : residuals_) {
    bytes_in_use_->fetch_sub(residual.memory.bytes(), std::memory_order_relaxed);
  }
}

Status ResidualTable::find(uint32_t number, uint64_t count, char** data) {
  const auto found = residuals_.find(number);
  if (found != residuals_.end() && found->second.count != count) {
    return {Code::kInvalid, "residual " + std::to_string(number) + " was made for " +
                                std::to_string(found->second.count) + " elements and is now used with " +
                                std::to_string(count) + ": take another number, or another communicator"};
  }
  if (found != residuals_.end()) {
    *data = found->second.memory.data();
    return Status::ok();
  }
  const uint64_t bytes = count * sizeof(float);
  const Headroom room = memory_headroom();
  if (bytes > room.bytes) {
    return {Code::kResource, "residual " + std::to_string(number) + " for error feedback needs " +
                                 std::to_string(bytes >> 20) + " MiB, but only " + std::to_string(room.bytes >> 20) +
                                 " MiB are left (" + room.bound + ")"};
  }
  Residual& made = residuals_[number];
  made.count = count;
  made.memory = Pages(bytes);
  bytes_in_use_->fetch_add(made.memory.bytes(), std::memory_order_relaxed);
  *data = made.memory.data();
  return Status::ok();
}

ResidualTable* ResidualStore::take(uint32_t comm, uint64_t instance) {
  const Lock lock(mutex_);
  Entry& entry = tables_[{comm, instance}];
  if (entry.table == nullptr) entry.table = std::make_unique<ResidualTable>(bytes_in_use_);
  entry.taken = true;
  return entry.table.get();
}

void ResidualStore::drop(uint32_t comm, uint64_t instance) {
  const Lock lock(mutex_);
  tables_.erase({comm, instance});
}

void ResidualStore::carry_over() {
  const Lock lock(mutex_);
  std::map<Key, Entry> kept;
  for (auto& [key, entry] : tables_) {  // of several incarnations the latest comes last
    if (entry.taken) kept[{key.first, first_instance(key.second)}] = {std::move(entry.table), false};
  }
  tables_ = std::move(kept);
}

void ResidualStore::clear() {
  const Lock lock(mutex_);
  tables_.clear();
}

}  // namespace bagua
