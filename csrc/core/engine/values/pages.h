// Memory of the engine's own: whole pages, and scratch memory for collectives between hosts.
//
// Thread safety: a ScratchPool belongs to one thread.
#pragma once

#include <sys/types.h>

#include <vector>

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

}  // namespace bagua
