#include "engine/job/succession.h"

#include <algorithm>
#include <utility>

namespace bagua {

namespace {

Status does_not_follow(uint64_t generation, const std::string& why) {
  return {Code::kInvalid, "Engine: generation " + std::to_string(generation) + " does not follow: " + why};
}

std::set<int> as_set(const std::vector<int>& members) {
  return {members.begin(), members.end()};
}

}  // namespace

Succession::Succession(const Membership& first)
    : present_{first.generation, as_set(first.local_members()), first.lobby, false} {}

std::vector<int> Succession::known() const {
  std::vector<int> all(present_.members.begin(), present_.members.end());
  all.insert(all.end(), lobby_.members.begin(), lobby_.members.end());
  return all;
}

bool Succession::in_lobby(int member) const {
  return lobby_.members.count(member) > 0;
}

Succession::Group* Succession::group_of(int member) {
  if (in_lobby(member)) return &lobby_;
  return present_.members.count(member) > 0 ? &present_ : nullptr;
}

Status Succession::check_lobby(const std::vector<int>& members) const {
  for (const int member : lobby_.members) {
    if (here_.count(member) == 0) continue;
    return {Code::kInvalid,
            "Engine: member " + std::to_string(member) + " is still in the lobby before: one at a time"};
  }
  for (const int member : members) {
    if (present_.members.count(member) > 0) {
      return {Code::kInvalid, "Engine: member " + std::to_string(member) + " is no newcomer: it is in generation " +
                                  std::to_string(present_.generation)};
    }
  }
  return Status::ok();
}

void Succession::open_lobby(const std::vector<int>& members) {
  lobby_ = {present_.generation, as_set(members), true, false};
}

Status Succession::plan(Plan plan) {
  const uint64_t generation = plan.next.generation;
  if (plan_ && generation == plan_->next.generation) return Status::ok();  // it was told twice
  if (Status status = check_next(generation); !status) return status;
  plan_ = std::move(plan);
  return Status::ok();
}

Status Succession::check_next(uint64_t generation) const {
  if (generation <= newest()) {
    return does_not_follow(generation, "it does not come after " + std::to_string(newest()));
  }
  if (plan_ && generation < plan_->next.generation) {
    return does_not_follow(generation, std::to_string(plan_->next.generation) + " is planned already");
  }
  return Status::ok();
}

const Plan* Succession::due() const {
  if (!plan_ || plan_->hold || (plan_->here && !(unsettled_.empty() && left_.empty()))) return nullptr;
  const auto awaits = [this](const Group& group) {
    return std::any_of(group.members.begin(), group.members.end(), [&](int member) {
      return awaited(member) && (!group.lobby || plan_->takes(member));  // others of the newcomers stay in their lobby
    });
  };
  return awaits(lobby_) || awaits(present_) ? nullptr : &*plan_;
}

bool Succession::empties_lobby(const Membership& next) const {
  return std::any_of(lobby_.members.begin(), lobby_.members.end(),
                     [&next](int member) { return next.rank_of(member) >= 0; });
}

void Succession::begin(const Membership& next) {
  Group before = std::exchange(present_, {next.generation, as_set(next.local_members()), false, false});
  if (empties_lobby(next)) before.members.merge(std::exchange(lobby_, {}).members);
  for (const int member : before.members) {
    waiting_.erase(member);
    unsettled_.erase(member);
    if (present_.members.count(member) > 0) continue;
    if (plan_ && !plan_->hold && !plan_->takes(member)) dismissed_.insert(member);
  }
  if (plan_ && plan_->next.generation <= next.generation) plan_.reset();
  left_.clear();
}

void Succession::dismiss() {
  dismissed_by_ = plan_->next.generation;
  dismissed_.merge(std::exchange(present_.members, {}));
  plan_.reset();
}

void Succession::joined(int member) {
  here_.insert(member);
  left_.erase(member);
}

void Succession::gone(int member, bool lost) {
  here_.erase(member);
  unsettled_.erase(member);
  if (Group* const group = group_of(member); group != nullptr && group->lobby && lost) group->lost = true;
  if (!lost && !present_.lobby && present_.members.count(member) > 0) left_.insert(member);
}

Succession::Answer Succession::enter(int member, uint64_t after, bool lost) {
  if (dismissed_.count(member) > 0) return Answer::kDismissed;
  const Group* const group = group_of(member);
  if (group == nullptr) return Answer::kLeftOut;
  if (group->generation > after) return Answer::kEnter;
  if (group->lobby) {
    if (group->lost && ready_.count(member) == 0) return Answer::kUnready;
    waiting_.insert(member);
    return ready_.insert(member).second ? Answer::kReady : Answer::kWait;
  }
  if (waiting_.insert(member).second && lost) unsettled_.insert(member);
  return Answer::kWait;
}

}  // namespace bagua
