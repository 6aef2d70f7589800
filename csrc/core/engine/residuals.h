// Error-feedback residuals: memory that a communicator keeps from one operation to the next, for as long as the job
// lasts or until the ranks destroy the communicator.
//
// Thread safety: ResidualStore from any thread; mutex_ guards the map. A ResidualTable belongs to the thread of the
// communicator that took it.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>

#include "base/mutex.h"
#include "base/status.h"
#include "engine/pages.h"

namespace bagua {

// Those of one communicator, by number.
class ResidualTable {
 public:
  explicit ResidualTable(std::atomic<uint64_t>* bytes_in_use) : bytes_in_use_(bytes_in_use) {}
  ~ResidualTable();
  ResidualTable(const ResidualTable&) = delete;
  ResidualTable& operator=(const ResidualTable&) = delete;

  // `count` float32, zeros at first. kInvalid: it was made for another count; kResource: no memory.
  Status find(uint32_t number, uint64_t count, char** data);

 private:
  struct Residual {
    uint64_t count;
    Pages memory;
  };
  std::map<uint32_t, Residual> residuals_;
  std::atomic<uint64_t>* const bytes_in_use_;
};

// Those of all communicators, by number and members. A communicator of a later generation with the same number and
// members takes over what its predecessor left.
class ResidualStore {
 public:
  // `bytes_in_use` is kept up to date with the memory held.
  explicit ResidualStore(std::atomic<uint64_t>* bytes_in_use) : bytes_in_use_(bytes_in_use) {}

  // The table of communicator `comm`; stays valid until drop() or clear(). `instance`: Communicator::instance().
  ResidualTable* take(uint32_t comm, uint64_t instance);
  // The communicator was destroyed.
  void drop(uint32_t comm, uint64_t instance);
  // A generation has ended, and no thread of it runs any more: its communicators' tables wait for their successors.
  // Frees those that were left by the generation before and that nobody took in this one.
  void carry_over();
  void clear();

 private:
  struct Entry {
    std::unique_ptr<ResidualTable> table;
    bool taken = false;  // in the present generation
  };
  using Key = std::pair<uint32_t, uint64_t>;  // communicator, instance

  std::atomic<uint64_t>* const bytes_in_use_;
  Mutex mutex_;
  std::map<Key, Entry> tables_ GUARDED_BY(mutex_);
};

}  // namespace bagua
