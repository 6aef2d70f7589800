#include "engine/job/registry.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "engine/remote/host_executor.h"

namespace bagua {

namespace {

constexpr size_t kMaxComms = 4096;
constexpr const char* kOneMeaning =
    ". All members must declare the same, and a number serves one communicator at a time. [BG501]";

Status invalid(uint64_t id, const std::string& what) {
  return {Code::kInvalid, "communicator " + std::to_string(id) + ": " + what};
}

std::string ranks_text(const std::vector<int>& ranks) {
  std::string text = "[";
  for (size_t i = 0; i < ranks.size() && i < 32; ++i) text += (i > 0 ? ", " : "") + std::to_string(ranks[i]);
  return text + (ranks.size() > 32 ? ", ...]" : "]");
}

}  // namespace

Registry::Registry(const Membership& membership, Prepare prepare)
    : membership_(membership), prepare_(std::move(prepare)) {}

void Registry::open() {
  std::vector<int> world;
  for (const auto& there : membership_.hosts) world.insert(world.end(), there.begin(), there.end());
  std::sort(world.begin(), world.end());
  auto comm = std::make_shared<Communicator>(0, world, membership_.hosts, membership_.host_index);
  const Lock lock(mutex_);
  give_room(comm.get());
  prepare_(comm.get());
  comms_[0].push_back({std::move(comm), {}, {}});
}

Status Registry::check(int rank, uint64_t id, const std::vector<int>& members) const {
  const size_t world = membership_.world_size();
  if (id == 0 || id > UINT32_MAX) return invalid(id, "the number must be 1 to 4294967295 (0 is the world)");
  for (size_t i = 0; i < members.size(); ++i) {
    if (members[i] < 0 || static_cast<size_t>(members[i]) >= world) {
      return invalid(
          id, "member " + std::to_string(members[i]) + " is not a rank of the world of " + std::to_string(world));
    }
    if (i > 0 && members[i] <= members[i - 1]) return invalid(id, "members must be sorted and different");
  }
  if (!std::binary_search(members.begin(), members.end(), rank)) {
    return invalid(id,
                   "rank " + std::to_string(rank) + " declares it but is not among its members " + ranks_text(members));
  }
  return Status::ok();
}

Status Registry::declare(int rank, uint64_t id, const std::vector<int>& members, uint32_t* room) {
  if (Status status = check(rank, id, members); !status) return status;
  const Lock lock(mutex_);
  if (closed_) return {Code::kAborted, "the generation has ended"};
  const auto found = comms_.find(static_cast<uint32_t>(id));
  if (found == comms_.end()) return make(rank, static_cast<uint32_t>(id), members, room);
  Entry* next = nullptr;  // that other ranks have declared and this one has not
  for (Entry& entry : found->second) {
    const bool same = entry.comm->members() == members;
    if (same && entry.used_by(rank)) {
      *room = entry.comm->room;
      return Status::ok();
    }
    if (!same && entry.destroyed.count(rank) == 0) {
      return {Code::kAborted, "communicator " + std::to_string(id) + ": rank " + std::to_string(rank) +
                                  " declares the members " + ranks_text(members) + ", rank " +
                                  std::to_string(*entry.declared.begin()) + " declared " +
                                  ranks_text(entry.comm->members()) + kOneMeaning};
    }
    if (same && next == nullptr && entry.declared.count(rank) == 0) next = &entry;
  }
  if (next == nullptr) return make(rank, static_cast<uint32_t>(id), members, room);
  next->declared.insert(rank);
  *room = next->comm->room;
  return Status::ok();
}

void Registry::give_room(Communicator* comm) {
  if (!may_meet(static_cast<size_t>(comm->hosts()), static_cast<size_t>(comm->size()))) return;
  const auto free = std::find(rooms_.begin() + kWorldRoom, rooms_.end(), false);
  if (free == rooms_.end()) return;
  *free = true;
  comm->room = static_cast<uint32_t>(free - rooms_.begin());
}

Status Registry::make(int rank, uint32_t id, const std::vector<int>& members, uint32_t* room) {
  if (count_ >= kMaxComms) {
    return invalid(id, "there are " + std::to_string(kMaxComms) + " already: destroy some");
  }
  auto comm = std::make_shared<Communicator>(id, members, membership_.hosts, membership_.host_index,
                                             incarnations_[{id, members}]);
  if (comm->hosts() > 1) {
    ++incarnations_[{id, members}];
  } else {
    incarnations_.erase({id, members});
  }
  give_room(comm.get());
  *room = comm->room;
  prepare_(comm.get());
  comms_[id].push_back({std::move(comm), {rank}, {}});
  ++count_;
  return Status::ok();
}

Status Registry::destroy(int rank, uint64_t id, Comm* dropped) {
  const Lock lock(mutex_);
  if (id == 0) return invalid(id, "the world can't be destroyed");
  if (closed_) return {Code::kAborted, "the generation has ended"};
  const auto found = id > UINT32_MAX ? comms_.end() : comms_.find(static_cast<uint32_t>(id));
  if (found == comms_.end()) return invalid(id, "rank " + std::to_string(rank) + " has not declared it");
  std::vector<Entry>& entries = found->second;
  const auto used = std::find_if(entries.begin(), entries.end(), [rank](const Entry& e) { return e.used_by(rank); });
  if (used == entries.end()) return invalid(id, "rank " + std::to_string(rank) + " has not declared it");
  used->destroyed.insert(rank);
  if (used->destroyed.size() < used->comm->local_ranks().size()) return Status::ok();
  *dropped = std::move(used->comm);
  if ((*dropped)->room != 0) rooms_[(*dropped)->room] = false;
  entries.erase(used);
  --count_;
  if (entries.empty()) comms_.erase(found);
  if ((*dropped)->executor != nullptr) retired_.push_back(*dropped);
  return Status::ok();
}

void Registry::reap() {
  std::vector<Comm> over;
  {
    const Lock lock(mutex_);
    const auto alive = [](const Comm& comm) { return !comm->executor->over(); };
    const auto first = std::stable_partition(retired_.begin(), retired_.end(), alive);
    std::move(first, retired_.end(), std::back_inserter(over));
    retired_.erase(first, retired_.end());
  }
  for (const Comm& comm : over) comm->executor->close();  // joins a thread that has ended
}

Registry::Comm Registry::find(uint32_t id, int rank) const {
  const Lock lock(mutex_);
  const auto found = comms_.find(id);
  if (found == comms_.end()) return nullptr;
  if (id == 0) return found->second.front().comm;
  for (const Entry& entry : found->second) {
    if (entry.used_by(rank)) return entry.comm;
  }
  return nullptr;
}

std::vector<Registry::Comm> Registry::all() const {
  const Lock lock(mutex_);
  std::vector<Comm> comms;
  for (const auto& [id, entries] : comms_) {
    for (const Entry& entry : entries) comms.push_back(entry.comm);
  }
  return comms;
}

std::vector<Registry::Comm> Registry::retired() const {
  const Lock lock(mutex_);
  return retired_;
}

std::vector<Registry::Comm> Registry::close() {
  const Lock lock(mutex_);
  closed_ = true;
  std::vector<Comm> comms = std::exchange(retired_, {});
  for (auto& [id, entries] : comms_) {
    for (Entry& entry : entries) comms.push_back(std::move(entry.comm));
  }
  comms_.clear();
  return comms;
}

std::string Registry::clash(uint32_t id, uint64_t instance, int host) const {
  const Lock lock(mutex_);
  const auto found = comms_.find(id);
  if (found == comms_.end()) return "";
  for (const Entry& entry : found->second) {
    const Communicator& comm = *entry.comm;
    if (Communicator::same_members(comm.instance(), instance)) continue;
    if (comm.executor != nullptr && comm.executor->has_departed(host)) continue;  // it will be destroyed here, too
    return "communicator " + std::to_string(id) + ": host " + std::to_string(host) +
           " declares other members than rank " + std::to_string(*entry.declared.begin()) + ", which declared " +
           ranks_text(comm.members()) + kOneMeaning;
  }
  return "";
}

}  // namespace bagua
