// Maps tickets to operations. Records are reused.
//
// Thread safety: any thread.
#pragma once

#include <memory>
#include <vector>

#include "base/mutex.h"
#include "gpu/leg/operation.h"

namespace bagua::device {

class OperationTable {
 public:
  explicit OperationTable(Runtime* runtime) : runtime_(runtime) {}
  ~OperationTable();

  // Takes a free record, with a ticket and an event for its end.
  Status take(Operation** out);
  // Returns nullptr if the ticket is unknown or released. The record stays until the ticket is released.
  Operation* find(uint64_t ticket);
  // Called by the caller: the ticket becomes invalid.
  void release(uint64_t ticket);
  // Called by the route: the device does not use the record any more.
  void retire(Operation* operation);

 private:
  static constexpr uint64_t kSlots = 1u << 20;  // ticket = number of the slot's use * kSlots + slot
  void give_back(Operation* operation) REQUIRES(mutex_);

  Runtime* const runtime_;
  Mutex mutex_;  // also guards Operation::ticket, retired, released
  std::vector<std::unique_ptr<Operation>> all_ GUARDED_BY(mutex_);
  std::vector<uint64_t> uses_ GUARDED_BY(mutex_);  // number of uses of each slot
  std::vector<size_t> free_ GUARDED_BY(mutex_);
};

}  // namespace bagua::device
