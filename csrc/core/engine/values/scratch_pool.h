// Scratch memory for collectives between hosts. It is used again: its pages are there already then.
//
// Thread safety: a pool belongs to one thread.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

namespace bagua {

class ScratchPool {
 public:
  // Undefined contents, aligned to a cache line.
  class Block {
   public:
    explicit Block(size_t bytes = 0)
        : lines_(bytes > 0 ? new Line[(bytes + sizeof(Line) - 1) / sizeof(Line)] : nullptr), bytes_(bytes) {}
    char* data() const { return reinterpret_cast<char*>(lines_.get()); }
    size_t bytes() const { return bytes_; }

   private:
    struct alignas(64) Line {
      char bytes[64];
    };
    std::unique_ptr<Line[]> lines_;
    size_t bytes_;
  };

  // At least `bytes`; the smallest block that fits, or a new one.
  Block take(size_t bytes) {
    const auto fits = std::find_if(free_.begin(), free_.end(), [bytes](const Block& b) { return b.bytes() >= bytes; });
    if (bytes == 0 || fits == free_.end()) return Block(bytes);
    Block block = std::move(*fits);
    free_.erase(fits);
    return block;
  }

  void give(Block block) {
    if (block.bytes() == 0) return;
    const auto larger = std::find_if(free_.begin(), free_.end(),
                                     [&block](const Block& other) { return other.bytes() > block.bytes(); });
    free_.insert(larger, std::move(block));
    if (free_.size() > kKept) free_.erase(free_.begin());  // the smallest: a larger one serves in its place
  }

 private:
  static constexpr size_t kKept = 4;  // as many as operations may be active

  std::vector<Block> free_;  // by size
};

}  // namespace bagua
