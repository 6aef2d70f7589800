#include "engine/remote/exchange.h"

#include <algorithm>

#include "base/clock.h"
#include "base/text.h"
#include "collective/ring_order.h"
#include "engine/local/local_executor.h"

namespace bagua {

namespace {

constexpr size_t kMaxActive = 4;
constexpr size_t kMaxHistory = 256;
constexpr size_t kMaxEarly = 65536;

using collective::computes;
using collective::Step;

uint64_t digest_of(const std::vector<int>& members) {
  uint64_t digest = 0xcbf29ce484222325;  // FNV-1a
  for (const int member : members) digest = (digest ^ static_cast<uint64_t>(member)) * 0x100000001b3;
  return digest;
}

// Ascending member numbers.
std::vector<int> members_of(const Membership& membership, const Communicator& comm) {
  std::vector<int> members;
  for (const int rank : comm.members()) members.push_back(membership.member_of(rank));
  std::sort(members.begin(), members.end());
  return members;
}

}  // namespace

Exchange::Exchange(GenerationState* state, const Communicator* comm, Mesh* mesh)
    : state_(state),
      comm_(comm),
      mesh_(mesh),
      members_digest_(digest_of(comm->members())),
      topology_(comm->topology()),
      residuals_(state->job().residuals().take(comm->id(), comm->instance(), members_of(state->membership(), *comm))),
      sends_(static_cast<size_t>(comm->hosts())),
      receives_(static_cast<size_t>(comm->hosts())),
      early_(static_cast<size_t>(comm->hosts())) {}

Status Exchange::set_ring(std::vector<int> order) {
  std::vector<int> sorted = order;
  std::sort(sorted.begin(), sorted.end());
  if (sorted != collective::plain_order(comm_->hosts()) || !history_.empty()) {
    return {Code::kInvalid, comm_name(comm_->id()) + ": the order of a ring must name each of its " +
                                std::to_string(comm_->hosts()) + " hosts once, before the first operation"};
  }
  topology_.ring = std::move(order);
  ring_digest_ = static_cast<uint32_t>(digest_of(topology_.ring));
  ring_awaited_ = false;
  return Status::ok();
}

void Exchange::add(Collective operation) {
  added_ = operation.sequence + 1;
  queued_.push_back(std::move(operation));
}

Status Exchange::pump() {
  if (ring_awaited_) return Status::ok();
  while (!queued_.empty() && may_begin(queued_.front())) {
    Collective next = std::move(queued_.front());
    queued_.pop_front();
    if (Status status = activate(std::move(next)); !status) return status;
  }
  for (int peer = 0; peer < comm_->hosts(); ++peer) {
    start_receives(peer);
    start_sends(peer);
  }
  return Status::ok();
}

// Several at once; but a fenced one follows all before it, and one residual serves one operation after the other.
bool Exchange::may_begin(const Collective& operation) const {
  if (active_.size() >= kMaxActive) return false;
  const auto fenced = [](const Operation& part) { return part.descriptor.fenced != 0; };
  if (std::any_of(operation.parts.begin(), operation.parts.end(), fenced)) return active_.empty();
  const uint32_t number = operation.first().descriptor.residual;
  return number == 0 || std::none_of(active_.begin(), active_.end(), [number](const auto& active) {
           return active->operation.first().descriptor.residual == number;
         });
}

// The program, and the memory that it works on.
Status Exchange::prepare(Active* active) {
  const Descriptor& descriptor = active->operation.first().descriptor;
  active->request = request_of(active->operation);
  active->request.encoding = {static_cast<Codec>(descriptor.codec), descriptor.density};
  active->request.feedback = descriptor.residual != 0;
  active->request.exact = descriptor.exact;
  active->memory = memory_of(active->operation);
  const size_t chunk_bytes =
      descriptor.chunk_kib != 0 ? size_t{descriptor.chunk_kib} << 10 : state_->job().options.chunk_bytes;
  active->program = collective::compile(topology_, active->request, chunk_bytes);
  active->scratch = scratch_.take(active->program.scratch_bytes);
  active->memory.scratch = active->scratch.data();
  if (active->operation.first().kind() == Kind::kMoveResiduals) {
    const Operation& one = active->operation.first();
    const auto* rows = reinterpret_cast<const ResidualMove*>(one.src);
    Status status = residuals_->move(std::vector<ResidualMove>(rows, rows + descriptor.count / kResidualMoveWords));
    if (status) return status;
    return {status.code(), operation_name(descriptor, active->operation.sequence) + ": " + status.message()};
  }
  if (!active->request.feedback) return Status::ok();
  const collective::OwnBlock own = collective::own_block(topology_, active->request);
  const ResidualShape shape{descriptor.count, own.begin, own.end, static_cast<uint32_t>(comm_->size()),
                            active->request.op == ReduceOp::kAvg};
  ResidualPlaces places;
  const auto sides = static_cast<ResidualSides>(descriptor.residual_sides);
  Status status = residuals_->find(descriptor.residual, shape, sides, &places);
  active->memory.carried = places.carried;
  active->memory.residual = places.written;
  if (status) return status;
  return {status.code(), operation_name(descriptor, active->operation.sequence) + ": " + status.message()};
}

Status Exchange::activate(Collective operation) {
  auto owner = std::make_unique<Active>();
  Active* active = owner.get();
  active->serial = next_serial_;
  next_serial_ = next_serial_ % kSerials + 1;
  active->operation = std::move(operation);
  state_->job().busy.start(now_ns());
  active_.push_back(std::move(owner));
  if (Status status = prepare(active); !status) return status;
  const collective::Program& program = active->program;
  active->activated_ns = now_ns();
  if (state_->job().trace.on()) active->begun.resize(program.steps.size());
  active->described.resize(static_cast<size_t>(comm_->hosts()), false);
  active->remaining = program.steps.size();
  const Operation& own = active->operation.first();
  history_.push_back({active->operation.sequence, own.descriptor, own.rank});
  if (history_.size() > kMaxHistory) history_.pop_front();
  const auto own_chunk_bytes = static_cast<uint32_t>(state_->job().options.chunk_bytes);
  const std::string description = encode(message::Describe{own.rank, active->operation.sequence, members_digest_,
                                                           own_chunk_bytes, ring_digest_, own.descriptor});
  for (const int peer : program.peers) mesh_->send_control(peer, description);
  for (uint32_t i = 0; i < program.steps.size(); ++i) {
    const Step& step = program.steps[i];
    active->waits_for.push_back(step.waits_for);
    if (step.type == Step::Type::kSend) sends_[static_cast<size_t>(step.peer)].push_back({active, i});
    if (step.type == Step::Type::kRecv) receives_[static_cast<size_t>(step.peer)].push_back({active, i});
    if (computes(step.type) && step.waits_for == 0) ready_.push_back({active, i});
  }
  for (int peer = 0; peer < comm_->hosts(); ++peer) {
    auto& early = early_[static_cast<size_t>(peer)];
    const auto found = early.find(active->operation.sequence);
    if (found == early.end()) continue;
    Status status = compare(peer, found->second, own.descriptor, own.rank);
    if (!status) return status;
    active->described[static_cast<size_t>(peer)] = true;
    early.erase(found);
  }
  if (active->remaining == 0) finish(active);
  return Status::ok();
}

Status Exchange::compare(int peer, const message::Describe& other, const Descriptor& own, int own_rank) const {
  const auto who = [this](int rank, int host) {
    return "rank " + std::to_string(rank) + " (host " + std::to_string(comm_->job_hosts()[static_cast<size_t>(host)]) +
           ")";
  };
  const std::string us = who(own_rank, comm_->topology().host), them = who(other.rank, peer);
  if (other.members != members_digest_) {
    return {Code::kInvalid, comm_name(comm_->id()) + ": " + them + " declared other members than " + us +
                                ". All members must declare the same. [BG501]"};
  }
  if (other.chunk_bytes != state_->job().options.chunk_bytes) {
    return {Code::kInvalid, "the engines of " + us + " and " + them + " have chunks of " +
                                std::to_string(state_->job().options.chunk_bytes) + " and " +
                                std::to_string(other.chunk_bytes) + " bytes: give all the same chunk_bytes [BG501]"};
  }
  if (other.ring != ring_digest_) {
    return {Code::kInvalid, comm_name(comm_->id()) + ": the engines of " + us + " and " + them +
                                " go round the hosts in different orders: all must be given the same [BG501]"};
  }
  if (same_call(other.descriptor, own)) return Status::ok();
  // Both hosts find out at once: the lower rank comes last, so that both say the same.
  if (own_rank < other.rank) {
    return {Code::kInvalid, mismatch_text(own, us, other.descriptor, them, other.sequence)};
  }
  return {Code::kInvalid, mismatch_text(other.descriptor, them, own, us, other.sequence)};
}

Status Exchange::describe(int peer, const message::Describe& other) {
  begun_elsewhere_ = std::max(begun_elsewhere_, other.sequence + 1);
  for (const Past& past : history_) {
    if (past.sequence != other.sequence) continue;
    if (Status status = compare(peer, other, past.descriptor, past.rank); !status) return status;
    for (const auto& active : active_) {
      if (active->operation.sequence != other.sequence) continue;
      active->described[static_cast<size_t>(peer)] = true;
      trace_described(*active, peer);
    }
    return Status::ok();
  }
  const bool begun = !history_.empty() && other.sequence < history_.back().sequence;
  if (begun) return Status::ok();  // so old that nothing of it is left here
  auto& early = early_[static_cast<size_t>(peer)];
  if (early.size() >= kMaxEarly) {
    return {Code::kInvalid, comm_->host_text(peer) + " is " + std::to_string(kMaxEarly) + " operations ahead"};
  }
  early[other.sequence] = other;
  return Status::ok();
}

void Exchange::start_sends(int peer) {
  auto& queue = sends_[static_cast<size_t>(peer)];
  while (!queue.empty() && !waiting(queue.front())) {
    const Item item = queue.front();
    queue.pop_front();
    const Step& step = item.active->program.steps[item.step];
    trace_begin(item);
    const char* data = collective::source_of(item.active->memory, item.active->program.refs[step.first_ref]);
    mesh_->send(peer, item.active->operation.sequence, step.tag, data, step.bytes,
                uint64_t{item.active->serial} << 32 | item.step);
  }
}

void Exchange::start_receives(int peer) {
  auto& queue = receives_[static_cast<size_t>(peer)];
  while (!queue.empty() && !waiting(queue.front()) && queue.front().active->described[static_cast<size_t>(peer)]) {
    const Item item = queue.front();
    queue.pop_front();
    const Step& step = item.active->program.steps[item.step];
    trace_begin(item);
    char* data = collective::target_of(item.active->memory, item.active->program.refs[step.first_ref]);
    mesh_->recv(peer, item.active->operation.sequence, step.tag, data, step.bytes,
                uint64_t{item.active->serial} << 32 | item.step);
  }
}

bool Exchange::compute() {
  if (ready_.empty()) return false;
  const Item item = ready_.front();
  ready_.pop_front();
  Active* active = item.active;
  trace_begin(item);
  collective::run_step(active->program, active->program.steps[item.step], active->request, comm_->size(),
                       active->memory, false);
  step_done(active, item.step);
  return true;
}

void Exchange::complete(uint64_t cookie) {
  const auto active =
      std::find_if(active_.begin(), active_.end(), [cookie](const auto& one) { return one->serial == cookie >> 32; });
  if (active != active_.end()) step_done(active->get(), static_cast<uint32_t>(cookie));
}

void Exchange::step_done(Active* active, uint32_t index) {
  const Step& done = active->program.steps[index];
  trace_step(*active, index);
  for (uint32_t i = 0; i < done.successors; ++i) {
    const uint32_t next = active->program.successors[done.first_successor + i];
    if (--active->waits_for[next] == 0 && computes(active->program.steps[next].type)) ready_.push_back({active, next});
  }
  if (--active->remaining == 0) finish(active);
}

void Exchange::finish(Active* active) {
  size_t inputs = 0;
  for (const Operation& part : active->operation.parts) {
    if (part.src != nullptr) inputs += part.bytes();
  }
  Counters& counters = state_->job().counters();
  counters.bytes_local.fetch_add(inputs, std::memory_order_relaxed);
  counters.ops.fetch_add(1, std::memory_order_relaxed);
  const int64_t done = now_ns();
  state_->job().busy.stop(done, &counters.comm_ns);
  if (!active->begun.empty()) {
    Trace* trace = &state_->job().trace;
    note_operation(trace, active->operation, comm_->id(), done);
    trace->note(span_of(active->operation, comm_->id(), "queued", active->operation.started_ns, active->activated_ns));
  }
  for (const Operation& part : active->operation.parts)
    RankTable::complete(part, active->operation.started_ns, Outcome::kDone);
  scratch_.give(std::move(active->scratch));
  active_.erase(std::find_if(active_.begin(), active_.end(), [active](const auto& a) { return a.get() == active; }));
}

void Exchange::trace_begin(const Item& item) const {
  if (!item.active->begun.empty()) item.active->begun[item.step] = now_ns();
}

void Exchange::trace_step(const Active& active, uint32_t index) const {
  if (active.begun.empty()) return;
  const Step& step = active.program.steps[index];
  constexpr const char* kPhases[] = {"reduce", "copy", "encode", "send", "receive"};  // by Step::Type
  const bool decodes = step.type == Step::Type::kTranscode && !step.message;
  const char* const phase = decodes ? "decode" : kPhases[static_cast<size_t>(step.type)];
  TraceSpan span = span_of(active.operation, comm_->id(), phase, active.begun[index], now_ns());
  if (step.peer >= 0) span.peer = comm_->job_hosts()[static_cast<size_t>(step.peer)];
  span.bytes = step.bytes;
  state_->job().trace.note(std::move(span));
}

void Exchange::trace_described(const Active& active, int peer) const {
  if (active.begun.empty()) return;
  TraceSpan span = span_of(active.operation, comm_->id(), "host", active.activated_ns, now_ns());
  span.peer = comm_->job_hosts()[static_cast<size_t>(peer)];
  state_->job().trace.note(std::move(span));
}

void Exchange::mark_awaited(std::vector<bool>* peers) const {
  if (ring_awaited_ && !queued_.empty()) peers->assign(peers->size(), true);
  for (const auto& active : active_) {
    for (const int peer : active->program.peers) {
      const auto at = static_cast<size_t>(peer);
      if (!active->described[at]) (*peers)[at] = true;
    }
  }
}

uint64_t Exchange::done() const {
  if (!active_.empty()) return active_.front()->operation.sequence;
  return queued_.empty() ? added_ : queued_.front().sequence;
}

std::string Exchange::oldest(uint64_t from) const {
  for (const auto& active : active_) {
    const Collective& operation = active->operation;
    if (operation.sequence >= from) return operation_name(operation.first().descriptor, operation.sequence);
  }
  for (const Collective& operation : queued_) {
    if (operation.sequence >= from) return operation_name(operation.first().descriptor, operation.sequence);
  }
  return "";
}

std::string Exchange::describe_pending(int64_t now, int64_t before_ns) const {
  if (ring_awaited_ && !queued_.empty() && queued_.front().started_ns <= before_ns) {
    return oldest() + ": all ranks of this host have submitted it and have been waiting for " +
           duration_text(now - queued_.front().started_ns) + " until the order of the hosts' ring is known";
  }
  if (active_.empty() || active_.front()->operation.started_ns > before_ns) return "";
  std::string silent;
  const Active& active = *active_.front();
  for (const int peer : active.program.peers) {
    if (active.described[static_cast<size_t>(peer)]) continue;
    silent += (silent.empty() ? "; " : ", ") + comm_->host_text(peer);
  }
  if (!silent.empty()) silent += " has not begun it";
  return oldest() + ": all ranks of this host have submitted it and have been waiting for other hosts for " +
         duration_text(now - active.operation.started_ns) + silent;
}

void Exchange::abandon() {
  const Outcome outcome = state_->outcome();
  for (const auto& active : active_) {
    for (const Operation& part : active->operation.parts) {
      RankTable::complete(part, active->operation.started_ns, outcome);
    }
    state_->job().busy.stop(now_ns(), &state_->job().counters().comm_ns);
  }
  for (const Collective& operation : queued_) {
    for (const Operation& part : operation.parts) RankTable::complete(part, operation.started_ns, outcome);
  }
  active_.clear();
  queued_.clear();
  ready_.clear();
  for (auto& queue : sends_) queue.clear();
  for (auto& queue : receives_) queue.clear();
}

}  // namespace bagua
