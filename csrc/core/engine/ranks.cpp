#include "engine/ranks.h"

#include "base/clock.h"
#include "channel/futex.h"

namespace bagua {

RankTable::RankTable(const std::vector<int>& ranks) {
  for (const int rank : ranks) {
    auto port = std::make_unique<Port>();
    port->rank = rank;
    port->outstanding = std::make_unique<std::atomic<bool>[]>(kSlots);
    for (uint32_t i = 0; i < kSlots; ++i) port->outstanding[i].store(false, std::memory_order_relaxed);
    ports_.push_back(std::move(port));
  }
}

RankTable::Port* RankTable::find(int rank) const {
  for (const auto& port : ports_) {
    if (port->rank == rank) return port.get();
  }
  return nullptr;
}

Phase RankTable::phase(int rank) const {
  const Port* port = find(rank);
  return port == nullptr ? Phase::kAbsent : port->phase.load(std::memory_order_acquire);
}

Status RankTable::join(int rank, pid_t pid, int* descriptor) {
  Port* port = find(rank);
  if (port == nullptr) return {Code::kInvalid, "rank " + std::to_string(rank) + " is not one of this host"};
  const Phase phase = port->phase.load(std::memory_order_acquire);
  if (phase != Phase::kAbsent) {
    const char* what = phase == Phase::kJoined ? " has joined already" : " has been here and gone";
    return {Code::kInvalid,
            "rank " + std::to_string(rank) + what + " (process " + std::to_string(pid) + " asks again)"};
  }
  if (Status status = Mapping::create(sizeof(RankChannel), &port->descriptor, &port->memory); !status) return status;
  RankChannel* channel = new (port->memory->data()) RankChannel();
  channel->version = kLayoutVersion;
  channel->rank = static_cast<uint32_t>(rank);
  *descriptor = port->descriptor.get();
  port->channel.store(channel, std::memory_order_release);
  port->phase.store(Phase::kJoined, std::memory_order_release);
  return Status::ok();
}

void RankTable::set_phase(int rank, Phase phase) {
  if (Port* port = find(rank)) port->phase.store(phase, std::memory_order_release);
}

void RankTable::close() {
  for (const auto& port : ports_) {
    port->channel.store(nullptr);
    port->memory.reset();
    port->descriptor.reset();
  }
}

bool RankTable::take(size_t index, Operation* out, Status* status) {
  Port* port = ports_[index].get();
  RankChannel* channel = port->channel.load(std::memory_order_acquire);
  if (channel == nullptr) return false;
  const uint64_t tail = channel->tail.load(std::memory_order_acquire);
  if (tail == port->head) return false;
  const std::string who = "rank " + std::to_string(port->rank);
  if (tail - port->head > kSlots) {
    port->head = tail;
    *status = {Code::kCorrupt, who + " wrote a submission counter that can't be: its shared memory is damaged"};
    return false;
  }
  const uint32_t slot = channel->ring[port->head % kSlots];
  ++port->head;
  if (slot >= kSlots || port->outstanding[slot].exchange(true)) {
    *status = {Code::kCorrupt,
               who + " submitted slot " + std::to_string(slot) + ", which is not free: its shared memory is damaged"};
    return false;
  }
  *out = Operation();
  out->rank = port->rank;
  out->slot = slot;
  out->descriptor = channel->slots[slot].descriptor;
  // For reports only, so a time from the future (the rank writes it) is cut to now.
  const int64_t now = now_ns();
  const int64_t submitted = channel->slots[slot].submitted_ns;
  out->submitted_ns = submitted < now ? submitted : now;
  return true;
}

std::atomic<uint32_t>* RankTable::finish(const Operation& operation, int64_t started_ns, int64_t done_ns, bool ok) {
  Port* port = find(operation.rank);
  if (port == nullptr) return nullptr;  // never: operations come from the table's ranks; but gcc can't know and warns
  RankChannel* channel = port->channel.load(std::memory_order_acquire);
  Slot* slot = &channel->slots[operation.slot];
  slot->started_ns = started_ns;
  slot->done_ns = done_ns;
  port->outstanding[operation.slot].store(false);  // before the rank may submit it again
  const uint32_t before = slot->state.exchange(ok ? kDone : kFailed, std::memory_order_acq_rel);
  return before == kSubmittedWaiting ? &slot->state : nullptr;
}

void RankTable::complete(const Operation& operation, int64_t started_ns, bool ok) {
  if (auto* const sleeper = finish(operation, started_ns, now_ns(), ok)) futex_wake(sleeper);
}

void RankTable::complete(const std::vector<Collective>& operations, bool ok) {
  const int64_t now = now_ns();
  std::vector<std::atomic<uint32_t>*> sleepers;
  for (const Collective& operation : operations) {
    for (const Operation& part : operation.parts) {
      if (auto* const sleeper = finish(part, operation.started_ns, now, ok)) sleepers.push_back(sleeper);
    }
  }
  for (auto* const sleeper : sleepers) futex_wake(sleeper);
}

}  // namespace bagua
