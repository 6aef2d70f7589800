#include "engine/values/pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <new>
#include <utility>

namespace bagua {

namespace {

constexpr size_t kKept = 4;  // free blocks: as many as operations may be active

}  // namespace

Pages::Pages(size_t bytes) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  bytes_ = (std::max<size_t>(bytes, 1) + page - 1) / page * page;
  void* data = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<char*>(data);
}

Pages::~Pages() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

Pages::Pages(Pages&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Pages& Pages::operator=(Pages&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

ScratchPool::Block ScratchPool::take(size_t bytes) {
  if (bytes == 0) return {};
  auto best = free_.end();
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    if (it->bytes() >= bytes && (best == free_.end() || it->bytes() < best->bytes())) best = it;
  }
  if (best == free_.end()) return Block(bytes);
  Block block = std::move(*best);
  free_.erase(best);
  return block;
}

void ScratchPool::give(Block block) {
  if (block.bytes() == 0) return;
  free_.push_back(std::move(block));
  if (free_.size() <= kKept) return;
  // The smallest goes: a larger one serves in its place.
  free_.erase(std::min_element(free_.begin(), free_.end(),
                               [](const Block& a, const Block& b) { return a.bytes() < b.bytes(); }));
}

}  // namespace bagua
