#include "engine/segments.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

namespace bagua {

namespace {
constexpr size_t kMaxSegments = 4096;  // of one rank: descriptors and mappings are finite
}

Status SegmentTable::alloc(int member, uint64_t bytes, Fd* descriptor, uint64_t* id, uint64_t* size) {
  if (bytes == 0) return {Code::kInvalid, "alloc: the size must be at least 1 byte"};
  {
    const Lock lock(mutex_);
    const auto first = segments_.lower_bound({member, 0}), last = segments_.lower_bound({member + 1, 0});
    if (static_cast<size_t>(std::distance(first, last)) >= kMaxSegments) {
      return {Code::kResource, "rank " + std::to_string(member) + " holds " + std::to_string(kMaxSegments) +
                                   " segments: free some, or allocate larger ones"};
    }
  }
  std::shared_ptr<Mapping> memory;
  if (Status status = Mapping::create(bytes, descriptor, &memory); !status) return status;
  const Lock lock(mutex_);
  *id = next_id_++;
  *size = memory->bytes();
  bytes_in_use_->fetch_add(memory->bytes());
  segments_[{member, *id}] = std::move(memory);
  return Status::ok();
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
  bytes_in_use_->fetch_sub(last->bytes());
  return Status::ok();
}

void SegmentTable::free_all(int member) {
  Reaper::Memory gone;
  Lock lock(mutex_);
  const auto first = segments_.lower_bound({member, 0}), last = segments_.lower_bound({member + 1, 0});
  for (auto it = first; it != last; ++it) {
    bytes_in_use_->fetch_sub(it->second->bytes());
    gone.push_back(std::move(it->second));
  }
  segments_.erase(first, last);
  lock.unlock();
  reaper_.take(std::move(gone));
}

std::shared_ptr<Mapping> SegmentTable::find(int member, uint64_t id) const {
  const Lock lock(mutex_);
  const auto found = segments_.find({member, id});
  return found == segments_.end() ? nullptr : found->second;
}

}  // namespace bagua
