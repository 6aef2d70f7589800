#include "engine/values/budget.h"

#include <algorithm>
#include <string>

namespace bagua {

namespace {

constexpr const char* kWayOut =
    " Run fewer ranks on this host, train a smaller model, or take a host with more memory.";

// Rounded up: "needs 0 MiB, has 0 MiB" helps nobody.
std::string mib(uint64_t bytes) {
  return std::to_string(bytes / (1 << 20) + (bytes % (1 << 20) != 0 ? 1 : 0)) + " MiB";
}

uint64_t sum(uint64_t a, uint64_t b) {
  return a > UINT64_MAX - b ? UINT64_MAX : a + b;
}

}  // namespace

Headroom Budget::room() const {
  Headroom room = host_();
  if (limit_ == 0) return room;
  const uint64_t used = in_use_->load();
  const uint64_t left = limit_ > used ? limit_ - used : 0;
  if (left < room.bytes) room = {left, "the limit of this engine, " + mib(limit_)};
  return room;
}

void Budget::regroup(size_t local_ranks, const std::vector<int>& gone) {
  const Lock lock(mutex_);
  local_ranks_ = local_ranks;
  for (const int member : gone) announced_.erase(member);
}

Status Budget::require(int member, uint64_t bytes) {
  const Lock lock(mutex_);
  announced_[member] = bytes;
  uint64_t needed = 0;
  for (const auto& [known, more] : announced_) needed = sum(needed, more);
  const uint64_t silent = local_ranks_ - std::min(local_ranks_, announced_.size());
  needed = sum(needed, silent > 0 && bytes > UINT64_MAX / silent ? UINT64_MAX : silent * bytes);
  const uint64_t held = in_use_->load();
  job_bytes_ = sum(held, needed);
  const Headroom left = room();
  if (needed <= left.bytes) return Status::ok();
  announced_.erase(member);
  return {Code::kResource, "this job needs " + mib(job_bytes_) + " of shared memory on this host (" +
                               std::to_string(local_ranks_) + " ranks, " + mib(bytes) + " for rank " +
                               std::to_string(member) + "): it holds " + mib(held) + " and can get " + mib(left.bytes) +
                               " more, bounded by " + left.bound + "." + kWayOut};
}

Status Budget::allow(int member, uint64_t bytes) {
  const Lock lock(mutex_);
  const Headroom left = room();
  if (bytes <= left.bytes) return Status::ok();
  const std::string all = job_bytes_ > 0 ? ", and needs " + mib(job_bytes_) + " in all" : "";
  return {Code::kResource, "rank " + std::to_string(member) + " asks for " + mib(bytes) +
                               " of shared memory, but only " + mib(left.bytes) + " are left, bounded by " +
                               left.bound + ". This job holds " + mib(in_use_->load()) + " on this host" + all + "." +
                               kWayOut};
}

void Budget::took(int member, uint64_t bytes) {
  const Lock lock(mutex_);
  const auto found = announced_.find(member);
  if (found != announced_.end()) found->second -= std::min(found->second, bytes);
}

}  // namespace bagua
