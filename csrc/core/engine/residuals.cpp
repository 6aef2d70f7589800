#include "engine/residuals.h"

#include <algorithm>
#include <iterator>
#include <string>

#include "channel/headroom.h"

namespace bagua {

namespace {

using Members = ResidualStore::Members;

Members without(const Members& all, const Members& some) {
  Members rest;
  std::set_difference(all.begin(), all.end(), some.begin(), some.end(), std::back_inserter(rest));
  return rest;
}

bool same(const ResidualShape& a, const ResidualShape& b) {
  return a.begin == b.begin && a.end == b.end && a.ranks == b.ranks && a.mean == b.mean;
}

// Factor that converts element `i` of a residual of this shape into units of results.
double to_results(const ResidualShape& shape, uint64_t i) {
  const bool own = i >= shape.begin && i < shape.end;
  return own || !shape.mean ? 1 : 1.0 / shape.ranks;
}

// A sum that was lost is n times the mean that was lost.
double between_results(const ResidualShape& from, const ResidualShape& to) {
  if (from.mean == to.mean) return 1;
  return from.mean ? from.ranks : 1.0 / to.ranks;
}

void convert(float* values, const ResidualShape& from, const ResidualShape& to) {
  // Between these places the factor is the same.
  std::vector<uint64_t> ends{from.begin, from.end, to.begin, to.end, to.count};
  std::sort(ends.begin(), ends.end());
  uint64_t begin = 0;
  for (const uint64_t end : ends) {
    if (end <= begin || end > to.count) continue;
    const double factor = to_results(from, begin) * between_results(from, to) / to_results(to, begin);
    if (factor != 1) {
      for (uint64_t i = begin; i < end; ++i) values[i] = static_cast<float>(values[i] * factor);
    }
    begin = end;
  }
}

}  // namespace

ResidualTable::~ResidualTable() {
  for (const auto& [number, residual] : residuals_) {
    for (const Pages& side : residual.sides) bytes_in_use_->fetch_sub(side.bytes(), std::memory_order_relaxed);
  }
}

Status ResidualTable::make(uint32_t number, uint64_t count, Pages* side) {
  if (side->data() != nullptr) return Status::ok();
  const uint64_t bytes = count * sizeof(float);
  const Headroom room = memory_headroom();
  if (bytes > room.bytes) {
    return {Code::kResource, "residual " + std::to_string(number) + " for error feedback needs " +
                                 std::to_string(bytes >> 20) + " MiB, but only " + std::to_string(room.bytes >> 20) +
                                 " MiB are left (" + room.bound + ")"};
  }
  *side = Pages(bytes);
  bytes_in_use_->fetch_add(side->bytes(), std::memory_order_relaxed);
  return Status::ok();
}

Status ResidualTable::find(uint32_t number, const ResidualShape& shape, ResidualSides sides, ResidualPlaces* places) {
  const auto found = residuals_.find(number);
  if (found != residuals_.end() && found->second.shape.count != shape.count) {
    return {Code::kInvalid, "residual " + std::to_string(number) + " was made for " +
                                std::to_string(found->second.shape.count) + " elements and is now used with " +
                                std::to_string(shape.count) + ": take another number, or another communicator"};
  }
  const size_t read = sides == kRead1Write0 ? 1 : 0, write = sides == kRead0Write1 ? 1 : 0;
  Residual& residual = found != residuals_.end() ? found->second : residuals_[number];
  if (found == residuals_.end()) residual.shape = shape;
  for (const size_t side : {read, write}) {
    if (Status status = make(number, shape.count, &residual.sides[side]); !status) return status;
  }
  if (!same(residual.shape, shape)) {
    for (const Pages& side : residual.sides) {
      if (side.data() != nullptr) convert(reinterpret_cast<float*>(side.data()), residual.shape, shape);
    }
    residual.shape = shape;
  }
  *places = {residual.sides[read].data(), residual.sides[write].data()};
  return Status::ok();
}

ResidualTable* ResidualStore::take(uint32_t comm, uint64_t instance, const Members& members) {
  const Lock lock(mutex_);
  Entry& entry = tables_[{comm, instance}];
  if (entry.table != nullptr) return entry.table.get();
  const Members gone = gone_, stayed = without(members, came_);
  const auto [first, last] = waiting_.equal_range(comm);
  const auto predecessor =
      std::find_if(first, last, [&](const auto& item) { return without(item.second.members, gone) == stayed; });
  if (predecessor != last) {
    entry = std::move(predecessor->second);
    waiting_.erase(predecessor);
  } else {
    entry.table = std::make_unique<ResidualTable>(bytes_in_use_);
  }
  entry.members = members;
  return entry.table.get();
}

void ResidualStore::drop(uint32_t comm, uint64_t instance) {
  const Lock lock(mutex_);
  tables_.erase({comm, instance});
}

void ResidualStore::carry_over(Members last, Members next) {
  std::sort(last.begin(), last.end());
  std::sort(next.begin(), next.end());
  const Lock lock(mutex_);
  waiting_.clear();
  for (auto& [key, entry] : tables_) {
    // Of several that had the number and these members, one after the other, the latest comes last.
    const auto [first, end] = waiting_.equal_range(key.first);
    const auto older = std::find_if(
        first, end, [&members = entry.members](const auto& item) { return item.second.members == members; });
    if (older != end) waiting_.erase(older);
    waiting_.emplace(key.first, std::move(entry));
  }
  tables_.clear();
  gone_ = without(last, next);
  came_ = without(next, last);
}

void ResidualStore::clear() {
  const Lock lock(mutex_);
  tables_.clear();
  waiting_.clear();
}

}  // namespace bagua
