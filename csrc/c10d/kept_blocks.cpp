#include "c10d/kept_blocks.h"

#include <c10/core/CPUAllocator.h>
#include <pthread.h>

#include <algorithm>
#include <list>
#include <unordered_map>
#include <utility>

#include "base/mutex.h"

namespace bagua::dist {

namespace {

constexpr size_t kLeastBlock = 1 << 20;  // smaller ones are the heap's
constexpr size_t kWaste = 8;             // one part in so many: layers that differ in a bias share blocks

class KeptBlocks final : public c10::Allocator {
 public:
  explicit KeptBlocks(c10::Allocator* own) : own_(own) {}

  c10::DataPtr allocate(size_t bytes) override {
    if (bytes < kLeastBlock) return own_->allocate(bytes);
    Block block;
    std::list<Block> out;  // what goes back to the kernel, without the lock
    {
      const Lock lock(mutex_);
      block = take(bytes);
      if (!block.memory) make_room(bytes, &out);
    }
    out.clear();
    if (!block.memory) block = {own_->allocate(bytes), bytes};
    void* const data = block.memory.get();
    const Lock lock(mutex_);
    bytes_.used += block.bytes;
    bytes_.most = std::max(bytes_.most, bytes_.used);
    used_.emplace(data, std::move(block));
    return {data, data, &give_back, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }

  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

  void lock() ACQUIRE(mutex_) { mutex_.lock(); }
  void unlock() RELEASE(mutex_) { mutex_.unlock(); }

  BlockBytes bytes() {
    const Lock lock(mutex_);
    return bytes_;
  }

 private:
  struct Block {
    c10::DataPtr memory;
    size_t bytes = 0;
  };

  static void give_back(void* data);

  void keep(void* data) {
    const Lock lock(mutex_);
    const auto found = used_.find(data);
    if (found == used_.end()) return own_->raw_deleter()(data);  // a small one
    bytes_.used -= found->second.bytes;
    bytes_.kept += found->second.bytes;
    kept_.push_back(std::move(found->second));
    used_.erase(found);
  }

  // The smallest block that is large enough, and hardly larger; of equal ones that which was freed last, as it is most
  // likely in the processor's cache.
  Block take(size_t bytes) REQUIRES(mutex_) {
    auto best = kept_.end();
    for (auto one = kept_.begin(); one != kept_.end(); ++one) {
      const bool fits = one->bytes >= bytes && one->bytes - bytes <= bytes / kWaste;
      if (fits && (best == kept_.end() || one->bytes <= best->bytes)) best = one;
    }
    if (best == kept_.end()) return {};
    Block block = std::move(*best);
    kept_.erase(best);
    bytes_.kept -= block.bytes;
    return block;
  }

  // Drops the oldest until there are, with the next block, no more than were in use at once.
  void make_room(size_t bytes, std::list<Block>* out) REQUIRES(mutex_) {
    const size_t most = std::max(bytes_.most, bytes_.used + bytes);
    while (bytes_.used + bytes_.kept + bytes > most) {
      bytes_.kept -= kept_.front().bytes;
      out->splice(out->end(), kept_, kept_.begin());
    }
  }

  c10::Allocator* const own_;
  Mutex mutex_;
  std::unordered_map<void*, Block> used_ GUARDED_BY(mutex_);
  std::list<Block> kept_ GUARDED_BY(mutex_);  // in the order in which they were freed
  BlockBytes bytes_ GUARDED_BY(mutex_);
};

KeptBlocks* made = nullptr;  // for ever: tensors may be freed at the very end of the process

void KeptBlocks::give_back(void* data) {
  made->keep(data);
}

}  // namespace

void keep_blocks() {
  if (made != nullptr) return;
  made = new KeptBlocks(c10::GetCPUAllocator());
  // A forked child, as of a DataLoader, allocates, too: no thread may hold the lock meanwhile.
  pthread_atfork([] { made->lock(); }, [] { made->unlock(); }, [] { made->unlock(); });
  c10::SetCPUAllocator(made);
}

BlockBytes block_bytes() {
  return made == nullptr ? BlockBytes{} : made->bytes();
}

}  // namespace bagua::dist
