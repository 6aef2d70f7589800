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
// A daemon that was killed. All of it lies in the job's vault, whose index is renewed with each change. The store of
// the daemon that is started next finds the tables there, for the communicators that come back; a repeated operation
// reads the side that the first attempt has read. Nothing is converted in place.
//
// Thread safety: ResidualStore from any thread; mutex_ guards the maps. A ResidualTable belongs to the thread of the
// communicator that took it, which changes it under the store's mutex alone.
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
#include "engine/values/vault.h"

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

class ResidualStore;

// Those of one communicator, by number.
class ResidualTable {
 public:
  explicit ResidualTable(ResidualStore* store) : store_(store) {}
  ~ResidualTable();
  ResidualTable(const ResidualTable&) = delete;
  ResidualTable& operator=(const ResidualTable&) = delete;

  // float32, zeros at first; converted where the last operation had another shape. kInvalid: it was made for another
  // count; kResource: no memory.
  Status find(uint32_t number, const ResidualShape& shape, ResidualSides sides, ResidualPlaces* places);
  // Vectors are cut anew: elements keep what they have lost, in terms of results. All of it, or nothing if it fails.
  // kInvalid: a row that does not fit; kResource: no memory.
  Status move(const std::vector<ResidualMove>& rows);

 private:
  friend class ResidualStore;
  struct Residual {
    ResidualShape shape;
    Vault::Area sides[2];  // the second one once it is used
  };
  Status make(uint32_t number, uint64_t count, Vault::Area* side) const;
  Status copy(const ResidualMove& row, std::map<uint32_t, Residual>* made) const;
  // As `residual`, in another shape and in other memory.
  Status converted(uint32_t number, const Residual& residual, const ResidualShape& shape, Residual* out) const;

  std::map<uint32_t, Residual> residuals_;
  ResidualStore* const store_;
};

// Those of all communicators. One of a later generation takes over what its predecessor left: that with the same number
// and the same members, but for those that have gone or come since.
class ResidualStore {
 public:
  using Members = std::vector<int>;  // ascending member numbers

  // `bytes_in_use` is kept up to date with the memory held.
  explicit ResidualStore(std::atomic<uint64_t>* bytes_in_use) : bytes_in_use_(bytes_in_use) {}
  // First. `memory`: a file of the job's memory (vault.h), which another store may have left; < 0: a new one.
  Status open(int memory);

  // The table of communicator `comm`; stays valid until drop() or clear(). `instance`: Communicator::instance().
  ResidualTable* take(uint32_t comm, uint64_t instance, const Members& members);
  // The communicator was destroyed.
  void drop(uint32_t comm, uint64_t instance);
  // A generation of these members begins, and no thread of the last one runs any more: its tables wait for the
  // successors of their communicators. Frees those that waited before and that nobody took, although the ranks used
  // others.
  void begin(Members world);
  void clear();

 private:
  friend class ResidualTable;
  struct Entry {
    Members members;
    Members world;  // of the generation in which it was used
    std::unique_ptr<ResidualTable> table;
  };
  using Key = std::pair<uint32_t, uint64_t>;  // communicator, instance

  bool follows(const Entry& last, const Members& members) const REQUIRES(mutex_);
  void publish() REQUIRES(mutex_);
  static void pack(uint32_t comm, const Entry& entry, Vault::Words* words);
  Status unpack(const Vault::Words& words, Vault::Places* places) REQUIRES(mutex_);

  std::atomic<uint64_t>* const bytes_in_use_;
  Vault vault_;
  Mutex mutex_;
  std::map<Key, Entry> tables_ GUARDED_BY(mutex_);             // of the present generation
  std::multimap<uint32_t, Entry> waiting_ GUARDED_BY(mutex_);  // left by earlier ones, by communicator
  Members world_ GUARDED_BY(mutex_);
  std::atomic<bool> used_{false};  // in the present generation
};

}  // namespace bagua
