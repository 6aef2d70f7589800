#include "engine/remote/p2p.h"

#include <algorithm>

#include "base/clock.h"

namespace bagua {

namespace {

// Names one message among all of the communicator. 15 bits for each end, 31 for its number: the numbers of messages
// that can be on their way at once are far less apart.
uint64_t operation_of(const SendOrRecv& half) {
  return PointToPoint::kCookie | static_cast<uint64_t>(half.source) << 47 |
         static_cast<uint64_t>(half.destination) << 31 | (half.message & 0x7fffffff);
}

}  // namespace

Status PointToPoint::add(SendOrRecv half) {
  if (half.operation.kind() == Kind::kRecv) {
    half.message = ++posted_[{half.source, half.destination}];
    begin(std::move(half));
    return Status::ok();
  }
  const Route route = route_of(half);
  const auto target = sought_.find({half.destination, half.operation.descriptor.tag});
  if (target != sought_.end()) ++target->second[half.source];
  const auto found = ready_.find(route);
  if (found == ready_.end()) {
    waiting_[route].push_back(std::move(half));
    if (target != sought_.end()) offer(route);
    return Status::ok();
  }
  const message::Ready other = found->second.front();
  found->second.pop_front();
  if (found->second.empty()) ready_.erase(found);
  return begin_send(std::move(half), other);
}

bool PointToPoint::is_on(uint32_t index, int host) const {
  return index < static_cast<uint32_t>(comm_->size()) && comm_->topology().host_of(static_cast<int>(index)) == host;
}

Status PointToPoint::can_not_be(int peer, const char* what) const {
  return {Code::kCorrupt, comm_->host_text(peer) + " " + what + " a message that can't be"};
}

void PointToPoint::seek(const Communicator::Target& target) {
  const std::string text = encode(message::Seek{static_cast<uint32_t>(target.first), target.second});
  for (int peer = 0; peer < comm_->hosts(); ++peer) {
    if (peer != comm_->topology().host) mesh_->send_control(peer, text);
  }
}

Status PointToPoint::on_seek(int peer, const message::Seek& other) {
  if (!is_on(other.destination, peer)) return can_not_be(peer, "seeks");
  const Communicator::Target target{static_cast<int>(other.destination), other.tag};
  const auto [known, first] = sought_.try_emplace(target);
  if (!first) return Status::ok();
  for (const int source : comm_->topology().local()) {
    const Route route{source, target.first, target.second};
    const auto sends = waiting_.find(route);
    const auto recvs = ready_.find(route);
    if (recvs != ready_.end()) known->second[source] = -static_cast<int64_t>(recvs->second.size());
    if (sends == waiting_.end()) continue;
    known->second[source] = static_cast<int64_t>(sends->second.size());
    offer(route);
  }
  return Status::ok();
}

void PointToPoint::offer(const Route& route) {
  const auto& [source, destination, tag] = route;
  const message::Offer offer{static_cast<uint32_t>(source), static_cast<uint32_t>(destination), tag,
                             static_cast<uint64_t>(sought_[{destination, tag}][source])};
  mesh_->send_control(comm_->topology().host_of(destination), encode(offer));
}

Status PointToPoint::on_offer(int peer, const message::Offer& other) {
  if (!is_on(other.source, peer) || !is_on(other.destination, comm_->topology().host)) {
    return can_not_be(peer, "offers");
  }
  const Communicator::Route route{static_cast<int>(other.source), static_cast<int>(other.destination), other.tag};
  SendOrRecv half;
  while (comm_->take_offered(route, other.sends, &half)) {
    if (Status status = add(std::move(half)); !status) return status;
  }
  return Status::ok();
}

Status PointToPoint::ready(int peer, const message::Ready& other) {
  if (!is_on(other.source, comm_->topology().host) || !is_on(other.destination, peer)) {
    return can_not_be(peer, "is ready for");
  }
  const int source = static_cast<int>(other.source), destination = static_cast<int>(other.destination);
  const Route route{source, destination, other.descriptor.tag};
  const auto found = waiting_.find(route);
  if (found == waiting_.end()) {
    ready_[route].push_back(other);
    return Status::ok();
  }
  SendOrRecv half = std::move(found->second.front());
  found->second.pop_front();
  if (found->second.empty()) waiting_.erase(found);
  return begin_send(std::move(half), other);
}

Status PointToPoint::begin_send(SendOrRecv half, const message::Ready& other) {
  Status status = check_pair(half.operation, other.descriptor, other.rank, half.sequence);
  if (status) {
    half.message = other.message;
    begin(std::move(half));
  } else {
    waiting_[route_of(half)].push_front(std::move(half));  // abandon() completes it
  }
  return status;
}

void PointToPoint::begin(SendOrRecv half) {
  const uint64_t id = next_id_++;
  Transfer& transfer = running_[id];
  transfer.half = std::move(half);
  transfer.started_ns = now_ns();
  state_->job().busy.start(transfer.started_ns);
  const SendOrRecv& moved = transfer.half;
  const bool sends = moved.operation.kind() == Kind::kSend;
  const int peer = comm_->topology().host_of(sends ? moved.destination : moved.source);
  const size_t bytes = moved.operation.bytes(), chunk = state_->job().options.chunk_bytes;
  transfer.remaining = (bytes + chunk - 1) / chunk;
  if (sends) ++sent_[{moved.source, peer}];
  for (size_t at = 0, tag = 0; at < bytes; at += chunk, ++tag) {
    const size_t length = std::min(chunk, bytes - at);
    if (sends) {
      mesh_->send(peer, operation_of(moved), tag, moved.operation.src + at, length, kCookie | id);
    } else {
      mesh_->recv(peer, operation_of(moved), tag, moved.operation.dst + at, length, kCookie | id);
    }
  }
  if (!sends) {
    const message::Ready ready{moved.operation.rank, static_cast<uint32_t>(moved.source),
                               static_cast<uint32_t>(moved.destination), moved.message, moved.operation.descriptor};
    mesh_->send_control(peer, encode(ready));
  }
  if (transfer.remaining == 0) finish(id, &transfer);
}

void PointToPoint::complete(uint64_t cookie) {
  const auto found = running_.find(cookie & ~kCookie);
  if (found == running_.end()) return;
  if (--found->second.remaining == 0) finish(found->first, &found->second);
}

void PointToPoint::finish(uint64_t id, Transfer* transfer) {
  Counters& counters = state_->job().counters();
  if (transfer->half.operation.kind() == Kind::kSend) {
    counters.bytes_local.fetch_add(transfer->half.operation.bytes(), std::memory_order_relaxed);
  } else {
    ++received_[transfer->half.source];
  }
  counters.ops.fetch_add(1, std::memory_order_relaxed);
  state_->job().busy.stop(now_ns(), &counters.comm_ns);
  RankTable::complete(transfer->half.operation, transfer->started_ns, Outcome::kDone);
  running_.erase(id);
}

void PointToPoint::mark_awaited(std::vector<bool>* peers) const {
  for (const auto& [route, sends] : waiting_) {
    (*peers)[static_cast<size_t>(comm_->topology().host_of(std::get<1>(route)))] = true;
  }
}

bool PointToPoint::pending(int rank) const {
  return any_pending([rank](const SendOrRecv& half) { return half.operation.rank == rank; });
}

bool PointToPoint::pending_with(int peer) const {
  return any_pending([this, peer](const SendOrRecv& half) {
    return comm_->topology().host_of(half.source) == peer || comm_->topology().host_of(half.destination) == peer;
  });
}

uint64_t PointToPoint::sends_begun(int index, int peer) const {
  const auto found = sent_.find({index, peer});
  return found == sent_.end() ? 0 : found->second;
}

std::string PointToPoint::needs_departed() const {
  const auto needs = [this](const SendOrRecv& half, int index, const std::string& how) {
    return "rank " + std::to_string(comm_->rank_of(index)) + " " + how + ", but " +
           operation_name(half.operation.descriptor, half.sequence) + " needs it";
  };
  for (const auto& [route, sends] : waiting_) {
    const SendOrRecv& half = sends.front();
    const auto gone = gone_.find(half.destination);
    if (gone != gone_.end()) return needs(half, half.destination, gone->second.how);
  }
  // A receive begins with a word to the source, which sends only after it. So what has not arrived of its sends belongs
  // to receives that run; any more of them wait for what will never come.
  std::map<int, uint64_t> running;
  for (const auto& [id, transfer] : running_) {
    const SendOrRecv& half = transfer.half;
    const auto gone = half.operation.kind() == Kind::kRecv ? gone_.find(half.source) : gone_.end();
    if (gone == gone_.end()) continue;
    const auto received = received_.find(half.source);
    if (++running[half.source] + (received == received_.end() ? 0 : received->second) > gone->second.sends) {
      return needs(half, half.source, gone->second.how);
    }
  }
  return "";
}

std::string PointToPoint::describe(const SendOrRecv& half, int64_t now) const {
  const int other = half.operation.kind() == Kind::kSend ? half.destination : half.source;
  return waits_text(operation_name(half.operation.descriptor, half.sequence), half.operation.rank,
                    comm_->rank_of(other), now - half.operation.submitted_ns);
}

std::string PointToPoint::describe_pending(int64_t now, int64_t before_ns) const {
  std::string text;
  each_waiting([&](const SendOrRecv& half) {
    if (half.operation.submitted_ns <= before_ns) text += describe(half, now);
  });
  for (const auto& [id, transfer] : running_) {
    if (transfer.half.operation.submitted_ns <= before_ns) text += describe(transfer.half, now);
  }
  return text;
}

void PointToPoint::abandon() {
  const Outcome outcome = state_->outcome();
  each_waiting(
      [&](const SendOrRecv& half) { RankTable::complete(half.operation, half.operation.submitted_ns, outcome); });
  for (const auto& [id, transfer] : running_) {
    RankTable::complete(transfer.half.operation, transfer.started_ns, outcome);
    state_->job().busy.stop(now_ns(), &state_->job().counters().comm_ns);
  }
  waiting_.clear();
  running_.clear();
  ready_.clear();
}

}  // namespace bagua
