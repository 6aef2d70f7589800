#include "engine/local/ranks.h"

#include <algorithm>
#include <new>
#include <utility>

#include "base/clock.h"
#include "base/sha256.h"
#include "channel/futex.h"
#include "channel/protocol.h"

namespace bagua {

namespace {

std::shared_ptr<Port> make_port(int member, const Tokens& tokens) {
  auto port = std::make_shared<Port>();
  port->member = member;
  for (const auto& [owner, token] : tokens) {
    if (owner == member) port->token = token;
  }
  port->outstanding = std::make_unique<std::atomic<bool>[]>(kSlots);
  for (uint32_t i = 0; i < kSlots; ++i) port->outstanding[i].store(false, std::memory_order_relaxed);
  return port;
}

}  // namespace

std::vector<int> RankTable::regroup(const std::vector<int>& members, const Tokens& tokens) {
  const Lock lock(mutex_);
  std::vector<int> gone;
  const auto stays = [&members](const auto& port) {
    return std::find(members.begin(), members.end(), port->member) != members.end();
  };
  const auto first = std::stable_partition(ports_.begin(), ports_.end(), stays);
  for (auto it = first; it != ports_.end(); ++it) gone.push_back((*it)->member);
  ports_.erase(first, ports_.end());
  for (const int member : members) {
    if (find(member) == nullptr) ports_.push_back(make_port(member, tokens));
  }
  return gone;
}

std::vector<std::shared_ptr<Port>> RankTable::ports(const std::vector<int>& members) const {
  const Lock lock(mutex_);
  std::vector<std::shared_ptr<Port>> found;
  for (const int member : members) found.push_back(find(member));
  return found;
}

std::shared_ptr<Port> RankTable::find(int member) const {
  for (const auto& port : ports_) {
    if (port->member == member) return port;
  }
  return nullptr;
}

Phase RankTable::phase(int member) const {
  const Lock lock(mutex_);
  const std::shared_ptr<Port> port = find(member);
  return port == nullptr ? Phase::kAbsent : port->phase.load(std::memory_order_acquire);
}

pid_t RankTable::pid(int member) const {
  const Lock lock(mutex_);
  const std::shared_ptr<Port> port = find(member);
  return port == nullptr ? 0 : port->pid.load();
}

Status RankTable::join(uint32_t member, const uint8_t* token, pid_t pid, Fd* descriptor) {
  const Lock lock(mutex_);
  const std::shared_ptr<Port> port = member > INT32_MAX ? nullptr : find(static_cast<int>(member));
  const std::string who = "rank " + std::to_string(member);
  if (port == nullptr || port->token.size() != kTokenBytes ||
      !equal_constant_time(port->token.data(), token, kTokenBytes)) {
    return {Code::kInvalid, "the node daemon refuses this process: it is not " + who + " of this job (wrong token)"};
  }
  const Phase phase = port->phase.load(std::memory_order_acquire);
  if (phase != Phase::kAbsent) {
    const char* what = phase == Phase::kJoined ? " has joined already" : " has been here and gone";
    return {Code::kInvalid, who + what + " (process " + std::to_string(pid) + " asks again)"};
  }
  if (Status status = Mapping::create(sizeof(RankChannel), &port->descriptor, &port->memory); !status) return status;
  RankChannel* channel = new (port->memory->data()) RankChannel();
  channel->member = member;
  *descriptor = duplicate(port->descriptor.get());
  port->pid.store(pid);
  port->channel.store(channel, std::memory_order_release);
  port->phase.store(Phase::kJoined, std::memory_order_release);
  return Status::ok();
}

bool RankTable::set_phase(int member, Phase phase, const std::string& words) {
  const Lock lock(mutex_);
  const std::shared_ptr<Port> port = find(member);
  if (port == nullptr) return false;
  if (port->phase.load() != Phase::kLeft) port->farewell = words;
  port->phase.store(phase, std::memory_order_release);
  return true;
}

bool RankTable::take(Port* port, Operation* out, Status* status) {
  RankChannel* channel = port->channel.load(std::memory_order_acquire);
  if (channel == nullptr) return false;
  const uint64_t tail = channel->tail.load(std::memory_order_acquire);
  if (tail == port->head) return false;
  if (tail - port->head > kSlots) {
    port->head = tail;
    *status = {Code::kCorrupt, "wrote a submission counter that can't be: its shared memory is damaged"};
    return false;
  }
  const uint32_t index = channel->ring[port->head % kSlots];
  ++port->head;
  if (index >= kSlots || port->outstanding[index].exchange(true)) {
    *status = {Code::kCorrupt,
               "submitted slot " + std::to_string(index) + ", which is not free: its shared memory is damaged"};
    return false;
  }
  const Slot& slot = channel->slots[index];
  *out = Operation();
  out->port = port;
  out->slot = index;
  out->generation = slot.generation;
  out->descriptor = slot.descriptor;
  // For reports only, so a time from the future (the rank writes it) is cut to now.
  const int64_t now = now_ns();
  const int64_t submitted = slot.submitted_ns;
  out->submitted_ns = submitted < now ? submitted : now;
  return true;
}

bool RankTable::is_busy(const Port& port) {
  RankChannel* channel = port.channel.load(std::memory_order_acquire);
  if (channel == nullptr) return false;
  return std::any_of(std::begin(channel->slots), std::end(channel->slots), [](const Slot& slot) {
    const uint32_t state = slot.state.load(std::memory_order_acquire);
    return state == kSubmitted || state == kSubmittedWaiting;
  });
}

std::atomic<uint32_t>* RankTable::finish(const Operation& operation, int64_t started_ns, int64_t done_ns,
                                         Outcome outcome) {
  Port* port = operation.port;
  RankChannel* channel = port->channel.load(std::memory_order_acquire);
  Slot* slot = &channel->slots[operation.slot];
  slot->started_ns = started_ns;
  slot->done_ns = done_ns;
  if (operation.kind() == Kind::kRecv) slot->descriptor.root = operation.descriptor.root;
  port->outstanding[operation.slot].store(false);  // before the rank may submit it again
  const uint32_t before = slot->state.exchange(static_cast<uint32_t>(outcome), std::memory_order_acq_rel);
  return before == kSubmittedWaiting ? &slot->state : nullptr;
}

void RankTable::complete(const Operation& operation, int64_t started_ns, Outcome outcome) {
  if (auto* const sleeper = finish(operation, started_ns, now_ns(), outcome)) futex_wake(sleeper);
}

void RankTable::complete(const std::vector<Collective>& operations) {
  const int64_t now = now_ns();
  std::vector<std::atomic<uint32_t>*> sleepers;
  for (const Collective& operation : operations) {
    for (const Operation& part : operation.parts) {
      if (auto* const sleeper = finish(part, operation.started_ns, now, Outcome::kDone)) sleepers.push_back(sleeper);
    }
  }
  for (auto* const sleeper : sleepers) futex_wake(sleeper);
}

}  // namespace bagua
