// Error-feedback residuals: memory that a communicator keeps from one operation to the next, for as long as the job
// lasts or until the ranks destroy the communicator.
//
// Two sides. An operation that may be repeated reads one side of a residual and writes the other, so that the
// repetition reads what the first attempt read. The rank says which, and swaps them when its step counts.
//
// A change of hosts. In the block that a host owns its residual is what the results lost, elsewhere what its own
// contribution lost, before the division of a mean by the number of ranks. What a host has lost is kept in terms of the
// results: when a block changes its owner, or a mean its number of ranks, the residual is multiplied or divided by that
// number. So what the next results get back is what the last ones lost, but for the part of hosts that are gone.
//
// Thread safety: ResidualStore from any thread; mutex_ guards the maps. A ResidualTable belongs to the thread of the
// communicator that took it.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "base/status.h"
#include "channel/layout.h"
#include "engine/pages.h"

namespace bagua {

// Meaning of a residual's elements.
struct ResidualShape {
  uint64_t count = 0;
  uint64_t begin = 0, end = 0;  // of the host's own block: there they are in terms of results
  uint32_t ranks = 1;
  bool mean = false;
};

// Where an operation reads and writes a residual.
struct ResidualPlaces {
  const char* carried = nullptr;
  char* written = nullptr;
};

// Those of one communicator, by number.
class ResidualTable {
 public:
  explicit ResidualTable(std::atomic<uint64_t>* bytes_in_use) : bytes_in_use_(bytes_in_use) {}
  ~ResidualTable();
  ResidualTable(const ResidualTable&) = delete;
  ResidualTable& operator=(const ResidualTable&) = delete;

  // float32, zeros at first; converted where the last operation had another shape. kInvalid: it was made for another
  // count; kResource: no memory.
  Status find(uint32_t number, const ResidualShape& shape, ResidualSides sides, ResidualPlaces* places);

 private:
  struct Residual {
    ResidualShape shape;
    Pages sides[2];  // the second one once it is used
  };
  Status make(uint32_t number, uint64_t count, Pages* side);

  std::map<uint32_t, Residual> residuals_;
  std::atomic<uint64_t>* const bytes_in_use_;
};

// Those of all communicators. One of a later generation takes over what its predecessor left: that with the same number
// and the same members, but for those that have gone or come with the generation.
class ResidualStore {
 public:
  using Members = std::vector<int>;  // ascending member numbers

  // `bytes_in_use` is kept up to date with the memory held.
  explicit ResidualStore(std::atomic<uint64_t>* bytes_in_use) : bytes_in_use_(bytes_in_use) {}

  // The table of communicator `comm`; stays valid until drop() or clear(). `instance`: Communicator::instance().
  ResidualTable* take(uint32_t comm, uint64_t instance, const Members& members);
  // The communicator was destroyed.
  void drop(uint32_t comm, uint64_t instance);
  // A generation of members `last` has ended, no thread of it runs any more, and one of members `next` begins: the
  // tables wait for the successors of their communicators. Frees those that waited before and that nobody took.
  void carry_over(Members last, Members next);
  void clear();

 private:
  struct Entry {
    Members members;
    std::unique_ptr<ResidualTable> table;
  };
  using Key = std::pair<uint32_t, uint64_t>;  // communicator, instance

  std::atomic<uint64_t>* const bytes_in_use_;
  Mutex mutex_;
  std::map<Key, Entry> tables_ GUARDED_BY(mutex_);             // of the present generation
  std::multimap<uint32_t, Entry> waiting_ GUARDED_BY(mutex_);  // left by the one before, by communicator
  Members gone_ GUARDED_BY(mutex_), came_ GUARDED_BY(mutex_);  // between the two
};

}  // namespace bagua
