#include "engine/job/circle.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

namespace bagua {

std::string Circle::look(int64_t now) {
  std::vector<Wait> found = find(waits());
  const bool again =
      !found.empty() && found.size() == seen_.size() &&
      std::equal(found.begin(), found.end(), seen_.begin(), [](const Wait& a, const Wait& b) { return a.same(b); });
  if (!again) {
    seen_ = std::move(found);
    since_ns_ = now;
    return "";
  }
  return now - since_ns_ < kProofNs ? "" : describe(seen_);
}

Circle::Waits Circle::waits() const {
  Waits found;
  const uint32_t generation = static_cast<uint32_t>(state_->membership().generation);
  for (const GenerationState::Local& local : state_->locals()) {
    Wait wait;
    if (wait_of(*registry_, local, generation, &wait)) found.emplace(local.rank, std::move(wait));
  }
  return found;
}

bool Circle::wait_of(const Registry& registry, const GenerationState::Local& local, uint32_t generation, Wait* out) {
  if (local.port->phase.load(std::memory_order_acquire) != Phase::kJoined) return false;
  const RankChannel* channel = local.port->channel.load(std::memory_order_acquire);
  if (channel == nullptr || channel->other_threads.load(std::memory_order_relaxed) != 0) return false;
  const uint32_t index = channel->main_waits.load(std::memory_order_relaxed) - 1;
  if (index >= kSlots) return false;  // none
  const Slot& slot = channel->slots[index];
  if (slot.state.load(std::memory_order_acquire) != kSubmittedWaiting || slot.generation != generation) return false;
  Descriptor mine;
  memcpy(&mine, &slot.descriptor, sizeof mine);
  const Registry::Comm comm = registry.find(mine.comm, local.rank);
  if (comm == nullptr) return false;
  out->rank = local.rank;
  out->slot = index;
  out->submitted_ns = slot.submitted_ns;
  out->awaited = comm->awaited(local.rank, mine, &out->name);
  return !out->awaited.empty();
}

// A rank needs all that it waits for. Whoever waits for none of those that wait can go on, and is left out. Each one of
// the rest waits for another one of them, so any way among them comes back to where it has been.
std::vector<Circle::Wait> Circle::find(Waits waits) {
  const auto next = [&waits](const Wait& wait) {
    return std::find_if(wait.awaited.begin(), wait.awaited.end(), [&waits](int rank) { return waits.count(rank) > 0; });
  };
  for (auto it = waits.begin(); it != waits.end();) {
    it = next(it->second) == it->second.awaited.end() ? (waits.erase(it), waits.begin()) : std::next(it);
  }
  std::vector<Wait> way;
  for (int rank = waits.empty() ? -1 : waits.begin()->first; rank >= 0; rank = *next(way.back())) {
    const auto before = std::find_if(way.begin(), way.end(), [rank](const Wait& wait) { return wait.rank == rank; });
    if (before != way.end()) return {before, way.end()};
    way.push_back(waits.at(rank));
  }
  return {};
}

std::string Circle::describe(const std::vector<Wait>& circle) {
  std::string text = "ranks wait for each other, and none of them can go on: ";
  for (size_t i = 0; i < circle.size(); ++i) {
    const Wait& next = circle[(i + 1) % circle.size()];
    text += (i > 0 ? ", " : "") + std::string("rank ") + std::to_string(circle[i].rank) + " in " + circle[i].name +
            " for rank " + std::to_string(next.rank);
  }
  return text +
         ". All ranks must call the same operations in the same order. "
         "If they have different numbers of batches, train inside of bagua.join(model) [BG502]";
}

}  // namespace bagua
