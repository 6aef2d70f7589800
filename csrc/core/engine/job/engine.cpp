#include "engine/job/engine.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "net/socket.h"

namespace bagua {

namespace {

Status check_peers(const Plan& plan) {
  if (plan.peers.size() != plan.next.hosts.size()) {
    return {Code::kInvalid, "Engine: " + std::to_string(plan.peers.size()) + " addresses for the " +
                                std::to_string(plan.next.hosts.size()) + " hosts of the plan"};
  }
  for (size_t host = 0; plan.peers.size() > 1 && host < plan.peers.size(); ++host) {
    std::string name;
    uint16_t port = 0;
    if (Status status = parse_address(plan.peers[host], &name, &port); !status) return status;
  }
  return Status::ok();
}

}  // namespace

Status Engine::create(EngineOptions options, Membership first, std::unique_ptr<Engine>* out) {
  if (Status status = check_options(options, first); !status) return status;
  std::unique_ptr<Engine> engine(new Engine(std::move(options), first));
  if (Status status = engine->open(std::move(first)); !status) return status;
  *out = std::move(engine);
  return Status::ok();
}

Status Engine::open(Membership first) {
  if (Status status = job_.open(); !status) return status;
  job_.regroup(first.local_members(), job_.options.tokens);
  job_.residuals().begin(first.all_members());
  auto opened = std::make_shared<Generation>(&job_, std::move(first), nullptr);
  if (Status status = opened->open(); !status) return status;
  {
    const Lock lock(generation_mutex_);
    generation_ = std::move(opened);
  }
  if (job_.options.elastic) {
    const Lock lock(planner_mutex_);
    planner_ = std::thread([this] { carry_out_plans(); });
  }
  const int64_t uid = job_.options.rank_uid;
  server_ = std::make_unique<ChannelServer>(job_.options.data_socket, static_cast<ChannelHandler*>(this),
                                            uid < 0 ? getuid() : static_cast<uid_t>(uid));
  return server_->start();
}

std::shared_ptr<Generation> Engine::generation() const {
  const Lock lock(generation_mutex_);
  return generation_;
}

std::shared_ptr<Generation> Engine::lobby() const {
  const Lock lock(generation_mutex_);
  return lobby_;
}

std::shared_ptr<Generation> Engine::generation_of(int member) const {
  const Lock lock(generation_mutex_);
  return lobby_ != nullptr && lobby_->membership().rank_of(member) >= 0 ? lobby_ : generation_;
}

int64_t Engine::step_ns() {
  const std::shared_ptr<Generation> present = generation();
  const Lock lock(pass_mutex_);
  return std::max(present->state().step_ns(), pass_clock_.look(present->state().passes(), now_ns()));
}

std::string Engine::waiting(int64_t longer_than_ns) const {
  std::string text = generation()->waiting(longer_than_ns);
  const std::shared_ptr<Generation> newcomers = lobby();
  const std::string more = newcomers == nullptr ? "" : newcomers->waiting(longer_than_ns);
  return text + (text.empty() || more.empty() ? "" : "\n") + more;
}

// Whether another generation, or a lobby, may follow at all.
Status Engine::check_open() const {
  if (closed_) return {Code::kInvalid, "Engine: it is closed"};
  if (!job_.options.elastic) return {Code::kInvalid, "Engine: it is not elastic, so no generation follows its first"};
  const std::string error = generation()->state().error();
  if (error.empty()) return Status::ok();
  return {Code::kInvalid, "Engine: the job has failed, so no generation follows: " + error};
}

Status Engine::regroup(Membership next, const Tokens& tokens) {
  const Lock lock(lifecycle_mutex_);
  const Lock no_abort_now(regroup_mutex_);
  if (Status status = check_open(); !status) return status;
  {
    const Lock order(succession_mutex_);
    if (Status status = check_members(next, succession_.known(), tokens); !status) return status;
    if (Status status = succession_.check_next(next.generation); !status) return status;
  }
  return follow(std::move(next), tokens);
}

Status Engine::follow(Membership next, const Tokens& tokens) {
  const std::shared_ptr<Generation> last = generation(), newcomers = lobby();
  std::vector<int> stay = next.local_members();
  bool empties_lobby = false;
  {
    const Lock lock(succession_mutex_);
    empties_lobby = succession_.empties_lobby(next);
  }
  const std::string reason = "generation " + std::to_string(last->membership().generation) +
                             " of this job has ended: generation " + std::to_string(next.generation) + " follows";
  last->state().retire(reason);
  if (empties_lobby) newcomers->state().retire(reason);
  last->close();
  if (empties_lobby) {
    newcomers->close();
  } else if (newcomers != nullptr) {
    const std::vector<int> others = newcomers->membership().local_members();
    stay.insert(stay.end(), others.begin(), others.end());
  }
  job_.regroup(stay, tokens);
  job_.residuals().begin(next.all_members());
  const std::vector<int> members = next.local_members();
  auto opened = std::make_shared<Generation>(&job_, next, last.get());
  if (Status status = opened->open(); !status) return status;
  {
    const Lock lock(generation_mutex_);
    generation_ = std::move(opened);
    if (empties_lobby) lobby_.reset();
  }
  {
    const Lock lock(succession_mutex_);
    succession_.begin(next);
  }
  job_.page.tell_change();
  // Members that left meanwhile are noted here, or by the server's thread, which sees the new generation by then.
  for (const int member : members) note_gone(member, job_.ranks.phase(member));
  return Status::ok();
}

Status Engine::open_lobby(const std::vector<int>& members, const Tokens& tokens) {
  const Lock lock(lifecycle_mutex_);
  if (Status status = check_open(); !status) return status;
  Membership membership{generation()->membership().generation, 0, {{}}, members, true};
  for (size_t rank = 0; rank < members.size(); ++rank) membership.hosts[0].push_back(static_cast<int>(rank));
  if (Status status = check_members(membership, {}, tokens); !status) return status;
  {
    const Lock order(succession_mutex_);
    if (Status status = succession_.check_lobby(members); !status) return status;
  }
  if (const auto before = lobby(); before != nullptr) {
    before->state().end("nobody is left in this lobby");
    before->close();
  }
  std::vector<int> stay = generation()->membership().local_members();
  stay.insert(stay.end(), members.begin(), members.end());
  job_.regroup(stay, tokens);
  auto opened = std::make_shared<Generation>(&job_, membership, nullptr);
  if (Status status = opened->open(); !status) return status;
  {
    const Lock pointers(generation_mutex_);
    lobby_ = std::move(opened);
  }
  const Lock order(succession_mutex_);
  succession_.open_lobby(members);
  return Status::ok();
}

Status Engine::plan(Plan plan) {
  const Lock lock(lifecycle_mutex_);
  if (Status status = check_open(); !status) return status;
  const bool described = plan.here && !plan.hold;
  if (described) {
    if (Status status = check_peers(plan); !status) return status;
  }
  const uint64_t number = plan.next.generation;
  {
    const Lock order(succession_mutex_);
    if (described) {
      if (Status status = check_members(plan.next, succession_.known(), {}); !status) return status;
    }
    if (Status status = succession_.plan(std::move(plan)); !status) return status;
  }
  job_.page.show_plan(number);
  plan_may_be_due_.notify_all();
  return Status::ok();
}

// The planner's thread.
void Engine::carry_out_plans() {
  for (;;) {
    {
      Lock lock(succession_mutex_);
      plan_may_be_due_.wait(lock,
                            [this]() REQUIRES(succession_mutex_) { return closing_ || succession_.due() != nullptr; });
      if (closing_) return;
    }
    const Lock lock(lifecycle_mutex_);
    const Lock no_abort_now(regroup_mutex_);
    std::optional<Plan> plan;
    {
      const Lock order(succession_mutex_);
      if (const Plan* const due = succession_.due(); due != nullptr) plan = *due;
    }
    if (!plan || closed_) continue;
    if (generation()->state().error().empty()) {
      carry_out(*plan);
    } else {  // the job is over
      const Lock order(succession_mutex_);
      succession_.forget_plan();
    }
  }
}

void Engine::carry_out(const Plan& plan) {
  const uint64_t number = plan.next.generation;
  if (!plan.here) {
    // The present generation stays until other hosts have left it: they may still need messages of its last step.
    {
      const Lock lock(succession_mutex_);
      succession_.dismiss();
    }
    job_.page.tell_change();
    return job_.events.tell("regrouped", -1, "", -1, number);
  }
  const uint64_t passes = generation()->state().passes();
  Status status = follow(plan.next, {});
  if (status) status = generation()->set_peers(plan.peers);
  if (!status) return generation()->state().abort("generation " + std::to_string(number) + ": " + status.message());
  job_.events.tell({"regrouped", -1, "", -1, number, {}, passes});
}

void Engine::abort(const std::string& reason) {
  const Lock lock(regroup_mutex_);
  generation()->state().abort(reason);
  if (const auto newcomers = lobby(); newcomers != nullptr) newcomers->state().abort(reason);
}

void Engine::withdraw(const std::string& reason) {
  const Lock lock(regroup_mutex_);
  const std::shared_ptr<Generation> present = generation();
  present->state().lose({reason, -1, present->membership().host_index});
  if (const auto newcomers = lobby(); newcomers != nullptr) newcomers->state().abort(reason);
}

void Engine::close() {
  {
    const Lock lock(succession_mutex_);
    closing_ = true;
    plan_may_be_due_.notify_all();
  }
  {
    const Lock lock(planner_mutex_);
    if (planner_.joinable()) planner_.join();
  }
  const Lock lock(lifecycle_mutex_);
  if (closed_) return;
  closed_ = true;
  const std::shared_ptr<Generation> last = generation(), newcomers = lobby();
  if (last == nullptr) return;  // it could not be opened
  // This order: keep the reason, accept no new channel, stop the generations, free what they ran on.
  const std::string reason = "the node daemon has closed the engine of this job: the job is over or was stopped";
  last->state().end(reason);
  if (newcomers != nullptr) newcomers->state().end(reason);
  server_.reset();
  last->close();
  if (newcomers != nullptr) newcomers->close();
  job_.close();
}

}  // namespace bagua
