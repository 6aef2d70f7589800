#include "engine/local/communicator.h"

#include <algorithm>

#include "base/clock.h"
#include "base/crc32c.h"
#include "base/text.h"

namespace bagua {

namespace {

std::string rank_text(int rank) {
  return "rank " + std::to_string(rank);
}

std::string list(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) text += (i > 0 ? ", " : "") + std::to_string(ranks[i]);
  return text;
}

uint64_t instance_digest(const std::vector<int>& members) {
  std::string text;
  for (const int member : members) text += std::to_string(member) + ",";
  return crc32c(text.data(), text.size());
}

}  // namespace

Communicator::Communicator(uint32_t id, std::vector<int> members, const std::vector<std::vector<int>>& hosts,
                           int host_index, uint32_t incarnation)
    : id_(id), instance_(instance_digest(members) << 32 | incarnation), members_(std::move(members)) {
  for (size_t h = 0; h < hosts.size(); ++h) {
    std::vector<int> there;
    for (size_t i = 0; i < members_.size(); ++i) {
      if (std::find(hosts[h].begin(), hosts[h].end(), members_[i]) != hosts[h].end()) {
        there.push_back(static_cast<int>(i));
      }
    }
    if (there.empty()) continue;
    if (static_cast<int>(h) == host_index) topology_.host = static_cast<int>(job_hosts_.size());
    job_hosts_.push_back(static_cast<int>(h));
    host_names_.push_back("host " + std::to_string(h) + " (" + list(hosts[h]) + ")");
    topology_.members.push_back(std::move(there));
  }
  for (const int index : topology_.local()) local_ranks_.push_back(rank_of(index));
  queues_.resize(local_ranks_.size());
}

int Communicator::index_of(int rank) const {
  const auto found = std::lower_bound(members_.begin(), members_.end(), rank);
  return found != members_.end() && *found == rank ? static_cast<int>(found - members_.begin()) : -1;
}

int Communicator::member_of(int rank) const {
  const auto found = std::lower_bound(local_ranks_.begin(), local_ranks_.end(), rank);
  return static_cast<int>(found - local_ranks_.begin());
}

void Communicator::push(Operation operation) {
  const Lock lock(mutex_);
  const bool sends = operation.kind() == Kind::kSend;
  if (!sends && operation.kind() != Kind::kRecv) {
    queues_[static_cast<size_t>(member_of(operation.rank))].push_back(std::move(operation));
    return;
  }
  const int other = operation.descriptor.root;
  const uint32_t tag = operation.descriptor.tag;
  const int source = sends ? operation.index : other;
  const Target target{sends ? other : operation.index, tag};
  operation.order = arrived_++;
  if (other == kAnySource) {
    push_from_any(std::move(operation));
  } else if (topology_.host_of(other) == topology_.host) {
    Lane& lane = lanes_[target][source];
    (sends ? lane.sends : lane.recvs).push_back(std::move(operation));
    touched_.insert(target);
  } else {
    between_.emplace_back(half_of(std::move(operation), {source, target.first, tag}));
  }
}

SendOrRecv Communicator::half_of(Operation operation, const Route& route) {
  const auto& [source, destination, tag] = route;
  if (operation.kind() == Kind::kRecv) {
    operation.descriptor.root = source;
    if (const auto found = sought_.find({destination, tag}); found != sought_.end()) ++found->second[source].posted;
  }
  return {std::move(operation), source, destination, halves_[{source, destination}]++, 0};
}

void Communicator::push_from_any(Operation operation) {
  const Target target{operation.index, operation.descriptor.tag};
  const auto [found, first] = hosts() > 1 ? sought_.try_emplace(target) : std::pair(sought_.end(), false);
  if (first) between_.emplace_back(target);
  if (found != sought_.end()) {
    for (const auto& [source, known] : found->second) {
      if (known.offered <= known.posted) continue;
      between_.emplace_back(half_of(std::move(operation), {source, target.first, target.second}));
      return;
    }
  }
  from_any_[target].push_back(std::move(operation));
  touched_.insert(target);
  awaits_any_.store(true, std::memory_order_relaxed);
}

Operation Communicator::pop_from_any(std::map<Target, std::deque<Operation>>::iterator any) {
  Operation operation = std::move(any->second.front());
  any->second.pop_front();
  if (any->second.empty()) from_any_.erase(any);
  awaits_any_.store(!from_any_.empty(), std::memory_order_relaxed);
  return operation;
}

bool Communicator::take_recv(const Target& target, int source, Lane* lane, Operation* out) {
  const auto any = from_any_.find(target);
  std::deque<Operation>& named = lane->recvs;
  if (any != from_any_.end() && (named.empty() || any->second.front().order < named.front().order)) {
    *out = pop_from_any(any);
  } else if (!named.empty()) {
    *out = std::move(named.front());
    named.pop_front();
  } else {
    return false;
  }
  out->descriptor.root = source;
  return true;
}

uint64_t Communicator::pairs_of(int source, int destination) const {
  const auto found = pairs_.find({source, destination});
  return found == pairs_.end() ? 0 : found->second;
}

bool Communicator::next_collective(Collective* out, Status* mismatch) {
  const Lock lock(mutex_);
  for (const auto& queue : queues_) {
    if (queue.empty()) return false;
  }
  out->parts.clear();
  for (auto& queue : queues_) {
    out->parts.push_back(std::move(queue.front()));
    queue.pop_front();
  }
  out->sequence = sequence_++;
  out->started_ns = now_ns();
  const Operation& one = out->first();
  for (const Operation& other : out->parts) {
    if (same_call(one.descriptor, other.descriptor)) continue;
    *mismatch = {Code::kInvalid, mismatch_text(one.descriptor, rank_text(one.rank), other.descriptor,
                                               rank_text(other.rank), out->sequence)};
    break;
  }
  return true;
}

bool Communicator::pair_of(const Target& target, Lanes* lanes, Pair* out) {
  for (auto it = lanes->begin(); it != lanes->end(); ++it) {
    Lane& lane = it->second;
    if (lane.sends.empty() || !take_recv(target, it->first, &lane, &out->recv)) continue;
    out->send = std::move(lane.sends.front());
    lane.sends.pop_front();
    if (lane.sends.empty() && lane.recvs.empty()) lanes->erase(it);
    return true;
  }
  return false;
}

bool Communicator::next_pair(Pair* out, Status* mismatch) {
  const Lock lock(mutex_);
  while (!touched_.empty()) {
    const Target target = *touched_.begin();
    const auto lanes = lanes_.find(target);
    if (lanes == lanes_.end() || !pair_of(target, &lanes->second, out)) {
      touched_.erase(touched_.begin());
      continue;
    }
    if (lanes->second.empty()) lanes_.erase(lanes);
    const uint64_t sequence = pairs_[{out->send.index, target.first}]++;
    *mismatch = check_pair(out->send, out->recv.descriptor, out->recv.rank, sequence);
    return true;
  }
  return false;
}

bool Communicator::next_between(Between* out) {
  const Lock lock(mutex_);
  if (between_.empty()) return false;
  *out = std::move(between_.front());
  between_.pop_front();
  return true;
}

bool Communicator::take_offered(const Route& route, uint64_t sends, SendOrRecv* out) {
  const Lock lock(mutex_);
  const auto& [source, destination, tag] = route;
  const auto found = sought_.find({destination, tag});
  if (found == sought_.end()) return false;
  Sought& known = found->second[source];
  known.offered = std::max(known.offered, sends);
  const auto any = from_any_.find(found->first);
  if (any == from_any_.end() || known.offered <= known.posted) return false;
  *out = half_of(pop_from_any(any), route);
  return true;
}

std::vector<Operation> Communicator::drain() {
  const Lock lock(mutex_);
  std::vector<Operation> all;
  const auto take = [&all](std::deque<Operation>* queue) {
    for (Operation& operation : *queue) all.push_back(std::move(operation));
    queue->clear();
  };
  for (auto& queue : queues_) take(&queue);
  for (auto& [target, lanes] : lanes_) {
    for (auto& [source, lane] : lanes) {
      take(&lane.sends);
      take(&lane.recvs);
    }
  }
  lanes_.clear();
  for (auto& [target, queue] : from_any_) take(&queue);
  from_any_.clear();
  awaits_any_.store(false, std::memory_order_relaxed);
  for (Between& one : between_) {
    if (auto* half = std::get_if<SendOrRecv>(&one)) all.push_back(std::move(half->operation));
  }
  between_.clear();
  return all;
}

std::string Communicator::needs(int rank, uint64_t remote) const {
  const int index = index_of(rank);
  if (index < 0) return "";
  const Lock lock(mutex_);
  const size_t member = static_cast<size_t>(member_of(rank));
  if (queues_[member].empty()) {
    for (const auto& queue : queues_) {
      if (!queue.empty()) return operation_name(queue.front().descriptor, sequence_);
    }
    if (remote > sequence_) return "operation #" + std::to_string(sequence_) + " of " + comm_name(id_);
  }
  for (const auto& [target, lanes] : lanes_) {
    for (const auto& [source, lane] : lanes) {
      if (source == index && lane.sends.empty() && !lane.recvs.empty()) {
        return operation_name(lane.recvs.front().descriptor, pairs_of(source, target.first));
      }
      if (target.first == index && lane.recvs.empty() && !lane.sends.empty()) {
        return operation_name(lane.sends.front().descriptor, pairs_of(source, target.first));
      }
    }
  }
  return "";
}

std::vector<int> Communicator::awaited(int rank, const Descriptor& mine, std::string* name) const {
  const Lock lock(mutex_);
  const Kind kind = static_cast<Kind>(mine.kind);
  if (kind != Kind::kSend && kind != Kind::kRecv) return awaited_collective(rank, name);
  const int index = index_of(rank), other = mine.root;
  if (other < 0 || other >= size() || topology_.host_of(other) != topology_.host) return {};
  const bool sends = kind == Kind::kSend;
  const auto lanes = lanes_.find({sends ? other : index, mine.tag});
  if (lanes == lanes_.end()) return {};
  const auto lane = lanes->second.find(sends ? index : other);
  if (lane == lanes->second.end() || (sends ? lane->second.sends : lane->second.recvs).empty()) return {};
  *name = operation_name(mine, sends ? pairs_of(index, other) : pairs_of(other, index));
  return {rank_of(other)};
}

std::vector<int> Communicator::awaited_collective(int rank, std::string* name) const {
  const std::deque<Operation>& own = queues_[static_cast<size_t>(member_of(rank))];
  if (own.empty()) return {};  // all have it
  std::vector<int> missing;
  for (size_t m = 0; m < queues_.size(); ++m) {
    if (queues_[m].empty()) missing.push_back(local_ranks_[m]);
  }
  *name = operation_name(own.front().descriptor, sequence_);
  return missing;
}

std::string Communicator::describe(int64_t now, int64_t before_ns) const {
  const Lock lock(mutex_);
  return describe_collectives(now, before_ns) + describe_lanes(now, before_ns);
}

std::string Communicator::describe_collectives(int64_t now, int64_t before_ns) const {
  std::vector<int> here, missing;
  const Operation* oldest = nullptr;
  for (size_t m = 0; m < queues_.size(); ++m) {
    (queues_[m].empty() ? missing : here).push_back(local_ranks_[m]);
    if (queues_[m].empty()) continue;
    const Operation& front = queues_[m].front();
    if (oldest == nullptr || front.submitted_ns < oldest->submitted_ns) oldest = &front;
  }
  if (oldest == nullptr || missing.empty() || oldest->submitted_ns > before_ns) return "";
  return operation_name(oldest->descriptor, sequence_) + ": " + list(here) + (here.size() == 1 ? " has" : " have") +
         " been waiting for " + list(missing) + " for " + duration_text(now - oldest->submitted_ns) + "\n";
}

std::string Communicator::describe_lanes(int64_t now, int64_t before_ns) const {
  std::string text;
  const auto line = [&](const Operation& waits, uint64_t sequence, int other) {
    if (waits.submitted_ns > before_ns) return;
    text +=
        waits_text(operation_name(waits.descriptor, sequence), waits.rank, rank_of(other), now - waits.submitted_ns);
  };
  for (const auto& [target, lanes] : lanes_) {
    for (const auto& [source, lane] : lanes) {
      const uint64_t sequence = pairs_of(source, target.first);
      if (!lane.sends.empty()) line(lane.sends.front(), sequence, target.first);
      if (!lane.recvs.empty()) line(lane.recvs.front(), sequence, source);
    }
  }
  for (const auto& [target, queue] : from_any_) {
    const Operation& waits = queue.front();
    if (waits.submitted_ns > before_ns) continue;
    text += std::string(kind_title(waits.kind())) + " of " + comm_name(id_) + ": rank " + std::to_string(waits.rank) +
            " has been waiting for any rank for " + duration_text(now - waits.submitted_ns) + "\n";
  }
  return text;
}

}  // namespace bagua
