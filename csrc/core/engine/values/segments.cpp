#include "engine/values/segments.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

namespace bagua {

namespace {
constexpr size_t kMaxSegments = 4096;  // of one rank: mappings are finite
constexpr size_t kMaxForPeers = 256;   // of one rank: descriptors are finite
}  // namespace

Status SegmentTable::alloc(int member, uint64_t bytes, bool for_peers, Fd* descriptor, uint64_t* id, uint64_t* size) {
  if (bytes == 0) return {Code::kInvalid, "alloc: the size must be at least 1 byte"};
  {
    const Lock lock(mutex_);
    const auto first = segments_.lower_bound({member, 0}), last = segments_.lower_bound({member + 1, 0});
    if (static_cast<size_t>(std::distance(first, last)) >= kMaxSegments) {
      return {Code::kResource, "rank " + std::to_string(member) + " holds " + std::to_string(kMaxSegments) +
                                   " segments: free some, or allocate larger ones"};
    }
    const auto begin = for_peers_.lower_bound({member, 0}), end = for_peers_.lower_bound({member + 1, 0});
    if (for_peers && static_cast<size_t>(std::distance(begin, end)) >= kMaxForPeers) {
      return {Code::kResource, "rank " + std::to_string(member) + " holds " + std::to_string(kMaxForPeers) +
                                   " segments for peers: free some, or allocate larger ones"};
    }
  }
  std::shared_ptr<Mapping> memory;
  if (Status status = Mapping::create(bytes, descriptor, &memory); !status) return status;
  Fd kept = for_peers ? duplicate(descriptor->get()) : Fd();
  if (for_peers && !kept.valid()) return {Code::kResource, "no descriptor is left for a segment for peers"};
  const Lock lock(mutex_);
  *id = next_id_++;
  *size = memory->bytes();
  bytes_in_use_->fetch_add(memory->bytes());
  segments_[{member, *id}] = std::move(memory);
  if (for_peers) for_peers_[{member, *id}] = std::move(kept);
  return Status::ok();
}

Status SegmentTable::borrow(int owner, uint64_t id, Fd* descriptor, uint64_t* size) const {
  const Lock lock(mutex_);
  const auto found = for_peers_.find({owner, id});
  if (found == for_peers_.end()) {
    return {Code::kInvalid, "borrow: rank " + std::to_string(owner) + " has made no segment " + std::to_string(id) +
                                " for peers, or has freed it"};
  }
  *size = segments_.at({owner, id})->bytes();
  *descriptor = duplicate(found->second.get());
  return descriptor->valid() ? Status::ok() : Status(Code::kResource, "no descriptor is left for a segment for peers");
}

Status SegmentTable::adopt(int member, uint64_t id, const Fd& descriptor, uint64_t* size) {
  if (id == 0 || id > UINT32_MAX) return {Code::kInvalid, "offer: " + std::to_string(id) + " is no segment"};
  std::shared_ptr<Mapping> memory;
  if (Status status = Mapping::adopt(descriptor.get(), &memory); !status) return status;
  const Lock lock(mutex_);
  if (segments_.count({member, id}) != 0) {
    return {Code::kInvalid, "offer: rank " + std::to_string(member) + " has a segment " + std::to_string(id)};
  }
  next_id_ = std::max(next_id_, static_cast<uint32_t>(id) + 1);
  *size = memory->bytes();
  bytes_in_use_->fetch_add(memory->bytes());
  segments_[{member, id}] = std::move(memory);
  return Status::ok();
}

Status SegmentTable::free(int member, uint64_t id) {
  std::shared_ptr<Mapping> last;  // unmapped after the lock is released
  const Lock lock(mutex_);
  const auto found = segments_.find({member, id});
  if (found == segments_.end()) {
    return {Code::kInvalid, "free: rank " + std::to_string(member) + " has no segment " + std::to_string(id)};
  }
  last = std::move(found->second);
  segments_.erase(found);
  for_peers_.erase({member, id});
  bytes_in_use_->fetch_sub(last->bytes());
  return Status::ok();
}

void SegmentTable::free_all(int member) {
  std::vector<std::shared_ptr<Mapping>> gone;
  const Lock lock(mutex_);
  const auto first = segments_.lower_bound({member, 0}), last = segments_.lower_bound({member + 1, 0});
  for (auto it = first; it != last; ++it) {
    bytes_in_use_->fetch_sub(it->second->bytes());
    gone.push_back(std::move(it->second));
  }
  segments_.erase(first, last);
  for_peers_.erase(for_peers_.lower_bound({member, 0}), for_peers_.lower_bound({member + 1, 0}));
  if (gone.empty()) return;
  freeing_ = std::thread([before = std::move(freeing_), gone = std::move(gone)]() mutable {
    gone.clear();  // what an operation still uses stays until that is over
    if (before.joinable()) before.join();
  });
}

void SegmentTable::finish_freeing() {
  std::thread last;
  {
    const Lock lock(mutex_);
    last.swap(freeing_);
  }
  if (last.joinable()) last.join();
}

std::shared_ptr<Mapping> SegmentTable::find(int member, uint64_t id) const {
  const Lock lock(mutex_);
  const auto found = segments_.find({member, id});
  return found == segments_.end() ? nullptr : found->second;
}

}  // namespace bagua
