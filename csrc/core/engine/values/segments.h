// Table of the shared-memory segments that local members hold.
//
// Thread safety: any thread. An operation keeps a shared_ptr to the memory that it uses, so giving a segment back, or
// the death of its owner, never unmaps memory in use.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <thread>
#include <utility>

#include "base/fd.h"
#include "base/mutex.h"
#include "base/status.h"
#include "channel/memory.h"

namespace bagua {

class SegmentTable {
 public:
  // `bytes_in_use` is kept up to date with what is handed out.
  explicit SegmentTable(std::atomic<uint64_t>* bytes_in_use) : bytes_in_use_(bytes_in_use) {}
  ~SegmentTable() { finish_freeing(); }

  // `for_peers`: others may borrow it. The table keeps its descriptor.
  Status alloc(int member, uint64_t bytes, bool for_peers, Fd* descriptor, uint64_t* id, uint64_t* size);
  // The descriptor of memory that `owner` has made for peers.
  Status borrow(int owner, uint64_t id, Fd* descriptor, uint64_t* size) const;
  // Takes memory that the member has from an engine before this one, under its id.
  Status adopt(int member, uint64_t id, const Fd& descriptor, uint64_t* size);
  Status free(int member, uint64_t id);
  // Frees the segments of a member that is gone. The kernel has the memory back a little later: that takes up to 0.5 ms
  // for each MiB, so a thread does it, and ranks need not wait for it before the next generation.
  void free_all(int member);
  // Returns when the kernel has it. One thread at a time.
  void finish_freeing();
  // nullptr if `member` has no such segment.
  std::shared_ptr<Mapping> find(int member, uint64_t id) const;

 private:
  using Key = std::pair<int, uint64_t>;  // owner, id

  mutable Mutex mutex_;
  std::map<Key, std::shared_ptr<Mapping>> segments_ GUARDED_BY(mutex_);
  std::map<Key, Fd> for_peers_ GUARDED_BY(mutex_);
  uint32_t next_id_ GUARDED_BY(mutex_) = 1;
  std::atomic<uint64_t>* const bytes_in_use_;
  std::thread freeing_ GUARDED_BY(mutex_);  // gives memory back, and joins the one before it
};

}  // namespace bagua
