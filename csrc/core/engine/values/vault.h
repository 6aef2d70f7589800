// Memory of a job that outlives the daemon: an anonymous file of areas, and an index of those that count. The daemon's
// keeper has the file open as well, and hands it to the daemon that it starts next.
//
// The daemon may be killed between any two stores. So an index is written whole, beside the last one, and takes its
// place by one store; areas that it does not name are given back by whoever opens the file next.
//
// Thread safety: any thread; one publish() at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "base/mutex.h"
#include "base/status.h"

namespace bagua {

class Vault {
 public:
  using Words = std::vector<uint64_t>;
  using Places = std::vector<std::pair<uint64_t, uint64_t>>;  // place, bytes

  // Memory of whole pages, given back by the destructor.
  class Area {
   public:
    Area() = default;
    ~Area();
    Area(Area&& other) noexcept { swap(other); }
    Area& operator=(Area&& other) noexcept {
      swap(other);
      return *this;
    }

    char* data() const { return data_; }
    size_t bytes() const { return bytes_; }
    uint64_t place() const { return place_; }  // in the file; 0: there is none

   private:
    friend class Vault;
    void swap(Area& other);

    std::shared_ptr<Fd> file_;
    uint64_t place_ = 0;
    char* data_ = nullptr;
    size_t bytes_ = 0;
  };

  // Takes a copy of `file`, which may have been used before; < 0: a new one.
  Status open(int file);
  // Zero-filled.
  Status make(uint64_t bytes, Area* out);
  // One that an earlier process has made.
  Status find(uint64_t place, uint64_t bytes, Area* out);
  // Gives back what lies neither there nor in the index.
  void keep_only(Places areas);

  // The last one that was published; empty: none, or by another version.
  Words index();
  // If there is no memory for it, an empty one takes its place.
  void publish(const Words& index);

 private:
  struct Header;
  static size_t page();
  Header* header() const { return reinterpret_cast<Header*>(header_.data()); }
  Status map(uint64_t place, uint64_t bytes, Area* out) const;

  std::shared_ptr<Fd> file_;  // constant after open()
  Area header_, index_;
  Mutex mutex_;
  uint64_t end_ GUARDED_BY(mutex_) = 0;  // of the file: places are not used again, and unused ones take no memory
};

}  // namespace bagua
