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

  // A fresh record with an event for its end, and a ticket.
  Status take(Operation** out);
  // nullptr: unknown, or released. The record stays until `release` (of the same ticket).
  Operation* find(uint64_t ticket);
  // Of the caller: the ticket is forgotten.
  void release(uint64_t ticket);
  // Of the route: nothing on the device uses the record.
  void retire(Operation* operation);

 private:
  static constexpr uint64_t kSlots = 1u << 20;  // tickets are a use of a slot: use * kSlots + slot
  void give_back(Operation* operation) REQUIRES(mutex_);

  Runtime* const runtime_;
  Mutex mutex_;  // also guards Operation::ticket, retired, released
  std::vector<std::unique_ptr<Operation>> all_ GUARDED_BY(mutex_);
  std::vector<uint64_t> uses_ GUARDED_BY(mutex_);  // of every slot
  std::vector<size_t> free_ GUARDED_BY(mutex_);
};

}  // namespace bagua::device
