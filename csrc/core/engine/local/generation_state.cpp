#include "engine/local/generation_state.h"

#include <algorithm>
#include <utility>

namespace bagua {

namespace {

// The other host that a loss speaks against; -1: none. Of a host that dies at once its engine may live long enough to
// tell that a rank is gone, and not long enough to tell the coordinator: then nobody else can say that it is lost.
int lost_host(const Membership& membership, const Loss& loss) {
  const int rank = loss.host < 0 && loss.member >= 0 ? membership.rank_of(loss.member) : -1;
  const int host = rank < 0 ? loss.host : membership.host_of(rank);
  return host == membership.host_index ? -1 : host;
}

}  // namespace

GenerationState::GenerationState(JobState* job, Membership membership, const GenerationState* last)
    : job_(job), membership_(std::move(membership)) {
  const std::vector<std::shared_ptr<Port>> ports = job_->ranks.ports(membership_.local_members());
  for (size_t i = 0; i < ports.size(); ++i) locals_.push_back({membership_.local_ranks()[i], ports[i]});
  for (size_t host = 0; host < membership_.hosts.size(); ++host) {
    stream_verdicts_.push_back(std::make_shared<StreamVerdict>());
  }
  if (last != nullptr) inherit(*last);
}

// A host is the same as one of the last generation if a member is on both.
void GenerationState::inherit(const GenerationState& last) {
  set_step_ns(last.step_ns());
  comes_first_ = last.membership_.lobby;
  const int hosts = static_cast<int>(membership_.hosts.size());
  std::vector<int> now(last.membership_.hosts.size(), -1);  // by host of the last generation
  for (int host = 0; host < hosts; ++host) {
    for (const int member : membership_.members_of(host)) {
      const int rank = last.membership_.rank_of(member);
      if (rank < 0) continue;
      const int before = last.membership_.host_of(rank);
      now[static_cast<size_t>(before)] = host;
      stream_verdicts_[static_cast<size_t>(host)] = last.stream_verdicts_[static_cast<size_t>(before)];
      break;
    }
  }
  const std::vector<int> measured = last.ring();
  for (const int before : measured.empty() ? last.kept_ring_ : measured) {
    const int host = now[static_cast<size_t>(before)];
    if (host >= 0) kept_ring_.push_back(host);
  }
  if (static_cast<int>(kept_ring_.size()) < hosts) kept_ring_.clear();
}

Phase GenerationState::phase(int rank) const {
  for (const Local& local : locals_) {
    if (local.rank == rank) return local.port->phase.load(std::memory_order_acquire);
  }
  return Phase::kAbsent;
}

// `latest`: the state up to which this one may follow.
bool GenerationState::stop(State state, State latest, const Loss& loss) {
  {
    const Lock lock(mutex_);
    if (state_.load(std::memory_order_relaxed) > latest) return false;
    loss_ = loss;
    sheet_.end(state == State::kSuspended ? kGenerationSuspended : kGenerationFailed, loss.text);
    state_.store(state, std::memory_order_release);
  }
  if (state != State::kSuspended) job_->page.tell_change();
  return true;
}

void GenerationState::fail(const Loss& loss, State latest) {
  if (!stop(State::kFailed, latest, loss)) return;
  job_->events.tell(membership_.lobby ? "lobby_failed" : "error", -1, loss.text, lost_host(membership_, loss));
  job_->page.ring_doorbell();
}

void GenerationState::end(const std::string& reason) {
  if (stop(State::kEnded, State::kSuspended, {reason})) job_->page.ring_doorbell();
}

void GenerationState::lose(const Loss& loss) {
  job_->options.elastic ? suspend(loss) : fail(loss, State::kRunning);
}

void GenerationState::suspend(const Loss& loss) {
  if (!stop(State::kSuspended, State::kRunning, loss)) return;
  if (!membership_.lobby) {
    job_->events.tell({"suspended", loss.member, loss.text, lost_host(membership_, loss), membership_.generation,
                       loss.accused, passes()});
  }
  job_->page.ring_doorbell();
}

uint64_t GenerationState::passes() const {
  uint64_t most = 0;
  for (const Local& local : locals_) {
    const RankChannel* channel = local.port->channel.load(std::memory_order_acquire);
    if (channel != nullptr) most = std::max(most, channel->passes.load(std::memory_order_relaxed));
  }
  return most;
}

void GenerationState::retire(const std::string& reason) {
  if (stop(State::kSuspended, State::kRunning, {reason, -1, -1, true})) job_->page.ring_doorbell();
}

std::string GenerationState::error() const {
  const Lock lock(mutex_);
  return state_.load(std::memory_order_relaxed) > State::kSuspended ? loss_.text : "";
}

Loss GenerationState::loss() const {
  const Lock lock(mutex_);
  return loss_;
}

bool GenerationState::lost() const {
  const Lock lock(mutex_);
  return state_.load(std::memory_order_relaxed) == State::kSuspended && !loss_.none;
}

void GenerationState::await_no_more(int rank) {
  for (size_t position = 0; position < locals_.size(); ++position) {
    if (locals_[position].rank == rank) sheet_.await_no_more(position);
  }
}

void GenerationState::set_ring(std::vector<int> order) {
  const Lock lock(mutex_);
  if (ring_.empty()) ring_ = std::move(order);
}

std::vector<int> GenerationState::ring() const {
  const Lock lock(mutex_);
  return ring_;
}

}  // namespace bagua
