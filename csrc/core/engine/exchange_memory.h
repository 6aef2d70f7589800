// Memory of the engine's own that collectives between hosts need: scratch for one operation, residuals kept from one to
// the next.
//
// Thread safety: the executor's thread only.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "base/status.h"

namespace bagua {

// Anonymous memory of whole pages, zero-filled, aligned to a page.
class Pages {
 public:
  Pages() = default;
  explicit Pages(size_t bytes);  // throws std::bad_alloc
  ~Pages();
  Pages(Pages&& other) noexcept;
  Pages& operator=(Pages&& other) noexcept;

  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  char* data_ = nullptr;
  size_t bytes_ = 0;
};

// Scratch memory is used again: its pages are then there already. Contents are undefined.
class ScratchPool {
 public:
  using Block = Pages;
  // At least `bytes`; the smallest block that fits, or a new one.
  Block take(size_t bytes);
  void give(Block block);

 private:
  std::vector<Block> free_;
};

// Error-feedback residuals of one communicator, by number.
class ResidualTable {
 public:
  explicit ResidualTable(std::atomic<uint64_t>* bytes_in_use) : bytes_in_use_(bytes_in_use) {}
  ~ResidualTable() { clear(); }

  // `count` float32, zeros at first. kInvalid: it was made for another count; kResource: no memory.
  Status find(uint32_t number, uint64_t count, char** data);
  void clear();

 private:
  struct Residual {
    uint64_t count;
    Pages memory;
  };
  std::map<uint32_t, Residual> residuals_;
  std::atomic<uint64_t>* const bytes_in_use_;
};

}  // namespace bagua
