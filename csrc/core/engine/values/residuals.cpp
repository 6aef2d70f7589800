#include "engine/values/residuals.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "channel/headroom.h"

namespace bagua {

namespace {

using Members = ResidualStore::Members;

Members common(const Members& one, const Members& other) {
  Members both;
  std::set_intersection(one.begin(), one.end(), other.begin(), other.end(), std::back_inserter(both));
  return both;
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

void convert(const float* values, float* converted, const ResidualShape& from, const ResidualShape& to) {
  // Between these places the factor is the same.
  std::vector<uint64_t> ends{from.begin, from.end, to.begin, to.end, to.count};
  std::sort(ends.begin(), ends.end());
  uint64_t begin = 0;
  for (const uint64_t end : ends) {
    if (end <= begin || end > to.count) continue;
    const double factor = to_results(from, begin) * between_results(from, to) / to_results(to, begin);
    for (uint64_t i = begin; i < end; ++i) converted[i] = static_cast<float>(values[i] * factor);
    begin = end;
  }
}

// Reads an index word by word.
class IndexReader {
 public:
  explicit IndexReader(const Vault::Words& words) : words_(words) {}
  uint64_t next() { return at_ < words_.size() ? words_[at_++] : (broken_ = true, 0); }
  // A number of things that take at least a word each.
  uint64_t count() {
    const uint64_t n = next();
    if (n <= words_.size() - at_) return n;
    broken_ = true;
    return 0;
  }
  Members members() {
    Members all(count());
    for (int& member : all) member = static_cast<int>(next());
    return all;
  }
  bool broken() const { return broken_; }

 private:
  const Vault::Words& words_;
  size_t at_ = 0;
  bool broken_ = false;
};

void pack_members(const Members& members, Vault::Words* words) {
  words->push_back(members.size());
  for (const int member : members) words->push_back(static_cast<uint64_t>(member));
}

}  // namespace

ResidualTable::~ResidualTable() {
  for (const auto& [number, residual] : residuals_) {
    for (const Vault::Area& side : residual.sides) store_->bytes_in_use_->fetch_sub(side.bytes());
  }
}

Status ResidualTable::make(uint32_t number, uint64_t count, Vault::Area* side) const {
  const uint64_t bytes = count * sizeof(float);
  const Headroom room = memory_headroom();
  if (bytes > room.bytes) {
    return {Code::kResource, "residual " + std::to_string(number) + " for error feedback needs " +
                                 std::to_string(bytes >> 20) + " MiB, but only " + std::to_string(room.bytes >> 20) +
                                 " MiB are left (" + room.bound + ")"};
  }
  if (Status status = store_->vault_.make(bytes, side); !status) return status;
  store_->bytes_in_use_->fetch_add(side->bytes());
  return Status::ok();
}

Status ResidualTable::converted(uint32_t number, const Residual& residual, const ResidualShape& shape,
                                Residual* out) const {
  out->shape = shape;
  for (size_t side = 0; side < 2; ++side) {
    const Vault::Area& last = residual.sides[side];
    if (last.data() == nullptr) continue;
    if (Status status = make(number, shape.count, &out->sides[side]); !status) return status;
    convert(reinterpret_cast<const float*>(last.data()), reinterpret_cast<float*>(out->sides[side].data()),
            residual.shape, shape);
  }
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
  store_->used_.store(true, std::memory_order_relaxed);
  Residual next;  // what is new
  next.shape = shape;
  bool changed = found == residuals_.end();
  if (!changed && !same(found->second.shape, shape)) {
    changed = true;
    if (Status status = converted(number, found->second, shape, &next); !status) return status;
  }
  const bool whole = changed;  // it replaces what was there
  for (const size_t side : {read, write}) {
    if (next.sides[side].data() != nullptr || (!whole && found->second.sides[side].data() != nullptr)) continue;
    if (Status status = make(number, shape.count, &next.sides[side]); !status) return status;
    changed = true;
  }
  if (changed) {
    const Lock lock(store_->mutex_);
    Residual& residual = residuals_[number];
    residual.shape = shape;
    for (size_t side = 0; side < 2; ++side) {
      if (whole || next.sides[side].data() != nullptr) std::swap(residual.sides[side], next.sides[side]);
    }
    store_->publish();
    for (const Vault::Area& side : next.sides) store_->bytes_in_use_->fetch_sub(side.bytes());  // the last ones
  }
  const Residual& residual = residuals_[number];
  *places = {residual.sides[read].data(), residual.sides[write].data()};
  return Status::ok();
}

Status ResidualTable::copy(const ResidualMove& row, std::map<uint32_t, Residual>* made) const {
  constexpr int64_t kMost = int64_t{1} << 40;  // elements: sums of two can't overflow
  const auto within = [](int64_t begin, int64_t length, int64_t count) {
    return begin >= 0 && length >= 0 && count <= kMost && begin <= count && length <= count - begin;
  };
  const Status wrong{Code::kInvalid, "residual " + std::to_string(row.from) + " can't be moved to residual " +
                                         std::to_string(row.to) + ": the places do not fit"};
  const auto known = [](int64_t number) { return number > 0 && number <= UINT32_MAX; };
  if (!known(row.from) || row.side < 0 || row.side > 1) return wrong;
  if (row.to != 0 && (!known(row.to) || !within(row.to_begin, row.length, row.to_count))) return wrong;
  const auto number = static_cast<uint32_t>(row.to);
  if (row.to != 0 && residuals_.count(number) != 0) return wrong;
  const auto found = residuals_.find(static_cast<uint32_t>(row.from));
  if (row.to == 0 || found == residuals_.end()) return Status::ok();
  const Residual& from = found->second;
  if (!within(row.from_begin, row.length, static_cast<int64_t>(from.shape.count))) return wrong;
  const Vault::Area& side = from.sides[row.side];
  if (side.data() == nullptr) return Status::ok();
  Residual& to = (*made)[number];
  if (to.sides[0].data() == nullptr) {
    to.shape = from.shape;
    to.shape.count = static_cast<uint64_t>(row.to_count);
    to.shape.begin = 0;  // all in terms of results: find() converts it to what the operation wants
    to.shape.end = to.shape.count;
    if (Status status = make(number, to.shape.count, &to.sides[0]); !status) return status;
  }
  if (to.shape.count != static_cast<uint64_t>(row.to_count)) return wrong;
  const auto* values = reinterpret_cast<const float*>(side.data()) + row.from_begin;
  auto* moved = reinterpret_cast<float*>(to.sides[0].data()) + row.to_begin;
  for (int64_t i = 0; i < row.length; ++i) {
    const double factor = to_results(from.shape, static_cast<uint64_t>(row.from_begin + i));
    moved[i] = static_cast<float>(values[i] * factor * between_results(from.shape, to.shape));
  }
  return Status::ok();
}

Status ResidualTable::move(const std::vector<ResidualMove>& rows) {
  std::map<uint32_t, Residual> made;
  const auto forget = [this](const Residual& residual) {
    for (const Vault::Area& side : residual.sides) store_->bytes_in_use_->fetch_sub(side.bytes());
  };
  for (const ResidualMove& row : rows) {
    if (Status status = copy(row, &made); !status) {
      for (const auto& [number, residual] : made) forget(residual);
      return status;
    }
  }
  std::vector<Residual> gone;  // their memory goes after the index has forgotten them
  const Lock lock(store_->mutex_);
  store_->used_.store(true, std::memory_order_relaxed);
  for (const ResidualMove& row : rows) {
    const auto found = row.to == 0 ? residuals_.find(static_cast<uint32_t>(row.from)) : residuals_.end();
    if (found == residuals_.end()) continue;
    forget(found->second);
    gone.push_back(std::move(found->second));
    residuals_.erase(found);
  }
  residuals_.merge(made);
  store_->publish();
  return Status::ok();
}

Status ResidualStore::open(int memory) {
  if (Status status = vault_.open(memory); !status) return status;
  const Lock lock(mutex_);
  Vault::Places places;
  if (const Vault::Words words = vault_.index(); !words.empty()) {
    if (Status status = unpack(words, &places); !status) return status;
  }
  publish();
  vault_.keep_only(std::move(places));
  return Status::ok();
}

// Of an entry: communicator, members, world, residuals; of a residual: number, shape, places of its sides (0: none).
void ResidualStore::pack(uint32_t comm, const Entry& entry, Vault::Words* words) {
  words->push_back(comm);
  pack_members(entry.members, words);
  pack_members(entry.world, words);
  words->push_back(entry.table->residuals_.size());
  for (const auto& [number, residual] : entry.table->residuals_) {
    const ResidualShape& shape = residual.shape;
    words->insert(words->end(), {number, shape.count, shape.begin, shape.end, shape.ranks, shape.mean ? 1u : 0u,
                                 residual.sides[0].place(), residual.sides[1].place()});
  }
}

Status ResidualStore::unpack(const Vault::Words& words, Vault::Places* places) {
  IndexReader reader(words);
  for (uint64_t entries = reader.count(); entries > 0; --entries) {
    const auto comm = static_cast<uint32_t>(reader.next());
    Entry entry;
    entry.members = reader.members();
    entry.world = reader.members();
    entry.table = std::make_unique<ResidualTable>(this);
    for (uint64_t residuals = reader.count(); residuals > 0; --residuals) {
      ResidualTable::Residual& residual = entry.table->residuals_[static_cast<uint32_t>(reader.next())];
      ResidualShape& shape = residual.shape;
      shape.count = reader.next();
      shape.begin = reader.next();
      shape.end = reader.next();
      shape.ranks = static_cast<uint32_t>(reader.next());
      shape.mean = reader.next() != 0;
      for (Vault::Area& side : residual.sides) {
        const uint64_t place = reader.next();
        if (place == 0) continue;
        if (Status status = vault_.find(place, shape.count * sizeof(float), &side); !status) return status;
        bytes_in_use_->fetch_add(side.bytes());
        places->emplace_back(side.place(), side.bytes());
      }
    }
    waiting_.emplace(comm, std::move(entry));
  }
  return reader.broken() ? Status{Code::kCorrupt, "the index of the job's memory is damaged"} : Status::ok();
}

void ResidualStore::publish() {
  Vault::Words words{waiting_.size() + tables_.size()};
  for (const auto& [comm, entry] : waiting_) pack(comm, entry, &words);
  for (const auto& [key, entry] : tables_) pack(key.first, entry, &words);
  vault_.publish(words);
}

// Whether a communicator of these members comes after one of a generation before.
bool ResidualStore::follows(const Entry& last, const Members& members) const {
  return common(last.members, world_) == common(members, last.world);
}

ResidualTable* ResidualStore::take(uint32_t comm, uint64_t instance, const Members& members) {
  const Lock lock(mutex_);
  Entry& entry = tables_[{comm, instance}];
  if (entry.table != nullptr) return entry.table.get();
  const auto [first, end] = waiting_.equal_range(comm);
  auto predecessor = end;
  for (auto it = first; it != end; ++it) {
    if (follows(it->second, members)) predecessor = it;  // the latest
  }
  if (predecessor != end) {
    entry = std::move(predecessor->second);
    waiting_.erase(predecessor);
  } else {
    entry.table = std::make_unique<ResidualTable>(this);
  }
  entry.members = members;
  entry.world = world_;
  publish();
  return entry.table.get();
}

void ResidualStore::drop(uint32_t comm, uint64_t instance) {
  const Lock lock(mutex_);
  const auto gone = tables_.extract({comm, instance});  // its memory goes after the index has forgotten it
  publish();
}

void ResidualStore::begin(Members world) {
  std::sort(world.begin(), world.end());
  const Lock lock(mutex_);
  std::multimap<uint32_t, Entry> gone;
  if (used_.exchange(false)) gone.swap(waiting_);
  for (auto& [key, entry] : tables_) {
    // Of several that had the number and these members, one after the other, the latest comes last.
    const auto [first, end] = waiting_.equal_range(key.first);
    const auto older = std::find_if(
        first, end, [&members = entry.members](const auto& item) { return item.second.members == members; });
    if (older != end) gone.insert(waiting_.extract(older));
    waiting_.emplace(key.first, std::move(entry));
  }
  tables_.clear();
  world_ = std::move(world);
  publish();
}

void ResidualStore::clear() {
  const Lock lock(mutex_);
  const std::map<Key, Entry> tables = std::exchange(tables_, {});
  const std::multimap<uint32_t, Entry> waiting = std::exchange(waiting_, {});
  vault_.publish({});
}

}  // namespace bagua
