#include "engine/registry.h"

#include <algorithm>
#include <string>

namespace bagua {

namespace {

constexpr size_t kMaxComms = 4096;

Status invalid(uint64_t id, const std::string& what) {
  return {Code::kInvalid, "communicator " + std::to_string(id) + ": " + what};
}

std::string list(const std::vector<int>& ranks) {
  std::string text = "[";
  for (size_t i = 0; i < ranks.size() && i < 32; ++i) text += (i > 0 ? ", " : "") + std::to_string(ranks[i]);
  return text + (ranks.size() > 32 ? ", ...]" : "]");
}

}  // namespace

Registry::Registry(const std::vector<std::vector<int>>& hosts, int host_index, Prepare prepare)
    : hosts_(hosts), host_index_(host_index), prepare_(std::move(prepare)) {}

void Registry::open() {
  std::vector<int> world;
  for (const auto& there : hosts_) world.insert(world.end(), there.begin(), there.end());
  std::sort(world.begin(), world.end());
  auto comm = std::make_shared<Communicator>(0, world, hosts_, host_index_);
  prepare_(comm.get());
  std::lock_guard<std::mutex> lock(mutex_);
  comms_[0].comm = std::move(comm);
}

Status Registry::declare(int rank, uint64_t id, const std::vector<int>& members) {
  size_t world = 0;
  for (const auto& there : hosts_) world += there.size();
  if (id == 0 || id > UINT32_MAX) return invalid(id, "the number must be 1 to 4294967295 (0 is the world)");
  for (size_t i = 0; i < members.size(); ++i) {
    if (members[i] < 0 || static_cast<size_t>(members[i]) >= world) {
      return invalid(
          id, "member " + std::to_string(members[i]) + " is not a rank of the world of " + std::to_string(world));
    }
    if (i > 0 && members[i] <= members[i - 1]) return invalid(id, "members must be sorted and different");
  }
  if (!std::binary_search(members.begin(), members.end(), rank)) {
    return invalid(id, "rank " + std::to_string(rank) + " declares it but is not among its members " + list(members));
  }
  std::lock_guard<std::mutex> lock(mutex_);
  const uint32_t key = static_cast<uint32_t>(id);
  if (used_.count(key) > 0) return invalid(id, "the number was used before; take a new one");
  const auto found = comms_.find(key);
  if (found != comms_.end()) {
    if (found->second.comm->members() != members) {
      return invalid(id, "rank " + std::to_string(rank) + " declares the members " + list(members) + ", rank " +
                             std::to_string(*found->second.declared.begin()) + " declared " +
                             list(found->second.comm->members()));
    }
    found->second.declared.insert(rank);
    return Status::ok();
  }
  if (comms_.size() >= kMaxComms)
    return invalid(id, "there are " + std::to_string(kMaxComms) + " already: destroy some");
  auto comm = std::make_shared<Communicator>(key, members, hosts_, host_index_);
  prepare_(comm.get());
  comms_[key] = {std::move(comm), {rank}, {}};
  return Status::ok();
}

Status Registry::destroy(int rank, uint64_t id, std::shared_ptr<Communicator>* dropped) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = comms_.find(static_cast<uint32_t>(id));
  if (id == 0) return invalid(id, "the world can't be destroyed");
  if (id > UINT32_MAX || found == comms_.end() || found->second.declared.count(rank) == 0) {
    return invalid(id, "rank " + std::to_string(rank) + " has not declared it");
  }
  Entry& entry = found->second;
  entry.destroyed.insert(rank);
  if (entry.destroyed.size() < entry.comm->local_ranks().size()) return Status::ok();
  *dropped = std::move(entry.comm);
  used_.insert(found->first);
  comms_.erase(found);
  return Status::ok();
}

std::shared_ptr<Communicator> Registry::find(uint32_t id) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = comms_.find(id);
  return found == comms_.end() ? nullptr : found->second.comm;
}

std::vector<std::shared_ptr<Communicator>> Registry::all() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::shared_ptr<Communicator>> comms;
  for (const auto& [id, entry] : comms_) comms.push_back(entry.comm);
  return comms;
}

std::vector<std::shared_ptr<Communicator>> Registry::clear() {
  std::vector<std::shared_ptr<Communicator>> comms = all();
  std::lock_guard<std::mutex> lock(mutex_);
  comms_.clear();
  return comms;
}

}  // namespace bagua
