// Requests of local ranks to the engine, on the channel server's thread.
#include "engine/job/engine.h"

namespace bagua {

namespace {

std::string process_text(const Membership& membership, int member, pid_t pid) {
  const int rank = membership.rank_of(member);
  return (rank < 0 ? "member " + std::to_string(member) : membership.rank_text(rank)) + " (pid " + std::to_string(pid) +
         ")";
}

// A process that has not entered the present one yet speaks of ranks and communicators of the one before.
Status same_generation(const Generation& present, uint32_t asked) {
  if (static_cast<uint32_t>(present.membership().generation) == asked) return Status::ok();
  return {Code::kRegrouped, "the generation in which this process asks has ended"};
}

}  // namespace

Status Engine::join(uint32_t member, const uint8_t* token, pid_t pid, Fd descriptors[3]) {
  const int number = member > INT32_MAX ? -1 : static_cast<int>(member);
  const std::shared_ptr<Generation> mine = generation_of(number);
  if (const std::string error = mine->state().error(); !error.empty()) return {Code::kAborted, error};
  if (Status status = job_.ranks.join(member, token, pid, &descriptors[2]); !status) return status;
  descriptors[0] = duplicate(job_.page.descriptor());
  descriptors[1] = duplicate(mine->page());
  {
    const Lock lock(succession_mutex_);
    succession_.joined(number);
  }
  job_.events.tell("joined", number, "process " + std::to_string(pid));
  return Status::ok();
}

Status Engine::enter(int member, uint64_t after, Fd* descriptor) {
  const std::shared_ptr<Generation> mine = generation_of(member);
  if (const std::string error = mine->state().error(); !error.empty()) return {Code::kAborted, error};
  const bool lost = mine->state().lost();
  Succession::Answer answer;
  {
    const Lock lock(succession_mutex_);
    answer = succession_.enter(member, after, lost);
    if (succession_.due() != nullptr) plan_may_be_due_.notify_all();
  }
  const std::string present = "generation " + std::to_string(generation()->membership().generation) + " of this job";
  switch (answer) {
    case Succession::Answer::kReady:
      job_.events.tell("ready_to_join", member, "");
      [[fallthrough]];
    case Succession::Answer::kWait:
      return {Code::kTimeout, "there is no next generation yet"};
    case Succession::Answer::kDismissed:
      return {Code::kDismissed, "this job goes on without this process, as was planned"};
    case Succession::Answer::kLeftOut:
      return {Code::kUnavailable, present + " goes on without this process"};
    case Succession::Answer::kUnready:
      return {Code::kUnavailable, "this newcomer was not ready to join when another one of this host was lost: " +
                                      mine->state().loss().text + ". The job goes on without them"};
    case Succession::Answer::kEnter:
      break;
  }
  *descriptor = duplicate(generation()->page());
  return descriptor->valid() ? Status::ok() : Status(Code::kResource, "no descriptor is left for a page");
}

Status Engine::require(int member, uint64_t bytes) {
  if (job_.budget().require(member, bytes)) return Status::ok();
  job_.segments().finish_freeing();
  return job_.budget().require(member, bytes);
}

Status Engine::alloc(int member, uint64_t bytes, bool for_peers, Fd* descriptor, uint64_t* id, uint64_t* size) {
  if (generation_of(member)->membership().rank_of(member) < 0) {
    return {Code::kInvalid, "alloc: this process is not in the present generation of the job"};
  }
  if (!job_.budget().allow(member, bytes)) {
    job_.segments().finish_freeing();  // memory of members that are gone may be on its way back
    if (Status status = job_.budget().allow(member, bytes); !status) return status;
  }
  const Status status = job_.segments().alloc(member, bytes, for_peers, descriptor, id, size);
  if (status) job_.budget().took(member, *size);
  return status;
}

Status Engine::borrow(int member, uint32_t owner, uint64_t id, Fd* descriptor, uint64_t* size) {
  const int other = owner > INT32_MAX ? -1 : static_cast<int>(owner);
  if (generation_of(member)->membership().rank_of(other) < 0) {
    return {Code::kInvalid, "borrow: member " + std::to_string(owner) + " is not in the generation of this process"};
  }
  return job_.segments().borrow(other, id, descriptor, size);
}

Status Engine::adopt(int member, uint64_t id, const Fd& memory) {
  uint64_t size = 0;
  const Status status = job_.segments().adopt(member, id, memory, &size);
  if (status) job_.budget().took(member, size);
  return status;
}

// A rank that was interrupted frees memory of operations that the dispatcher may not have seen yet: others need them.
Status Engine::free_segment(int member, uint64_t id) {
  generation_of(member)->take_submitted(member);
  return job_.segments().free(member, id);
}

Status Engine::declare(int member, uint64_t comm, uint32_t generation, const std::vector<int>& ranks, uint32_t* room) {
  const std::shared_ptr<Generation> mine = generation_of(member);
  if (Status status = same_generation(*mine, generation); !status) return status;
  return mine->declare(member, comm, ranks, room);
}

Status Engine::destroy(int member, uint64_t comm, uint32_t generation) {
  const std::shared_ptr<Generation> mine = generation_of(member);
  if (Status status = same_generation(*mine, generation); !status) return status;
  return mine->destroy(member, comm);
}

void Engine::left(int member, const std::string& words) {
  const bool known = job_.ranks.set_phase(member, Phase::kLeft, words);
  note_absence(member, false);
  job_.segments().free_all(member);
  job_.events.tell("left", member, "");
  if (known) note_gone(member, Phase::kLeft);
}

void Engine::lost(int member, pid_t pid) {
  const bool known = job_.ranks.set_phase(member, Phase::kLost);
  note_absence(member, true);
  const std::string who = process_text(generation_of(member)->membership(), member, pid);
  job_.events.tell("lost", member, who + " went away without leaving");
  if (known) {
    note_gone(member, Phase::kLost,
              who + " went away without leaving: it crashed, was killed, or ended in the middle of the job");
  }
  job_.segments().free_all(member);  // last: what it had submitted must not be taken for a mistake
}

void Engine::failed(int member, pid_t pid, bool lost, const std::string& text) {
  const bool known = job_.ranks.set_phase(member, Phase::kLost);
  note_absence(member, true);
  job_.events.tell(lost ? "told_lost" : "failed", member, text);
  const std::string who = process_text(generation_of(member)->membership(), member, pid);
  if (known) note_gone(member, Phase::kLost, who + (lost ? " is lost: " : " has failed: ") + text, !lost);
  job_.segments().free_all(member);
}

void Engine::note_absence(int member, bool lost) {
  const Lock lock(succession_mutex_);
  succession_.gone(member, lost);
  if (succession_.due() != nullptr) plan_may_be_due_.notify_all();
}

bool Engine::was_dismissed(int member) {
  const Lock lock(succession_mutex_);
  return succession_.dismissed(member);
}

// After its phase was set. A member that is in no generation any more, or is dismissed, is nobody's loss.
void Engine::note_gone(int member, Phase phase, const std::string& words, bool fault) {
  const std::shared_ptr<Generation> mine = generation_of(member);
  const Membership& membership = mine->membership();
  if (membership.rank_of(member) < 0) return;
  if (phase == Phase::kLeft) {
    mine->state().await_no_more(membership.rank_of(member));
    job_.page.ring_doorbell();
  } else if (phase == Phase::kLost && !was_dismissed(member)) {
    fault && !membership.lobby ? mine->state().abort(words) : mine->state().lose({words, member, -1});
  }
}

void Engine::bad_connection() {
  job_.counters().bad_connections.fetch_add(1, std::memory_order_relaxed);
}

void Engine::scarce(const std::string& text) {
  job_.events.tell("scarce", -1, text);
}

}  // namespace bagua
