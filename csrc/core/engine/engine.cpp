#include "engine/engine.h"

#include <algorithm>
#include <utility>

namespace bagua {

namespace {

std::string process_text(const Membership& membership, int member, pid_t pid) {
  const int rank = membership.rank_of(member);
  return (rank < 0 ? "member " + std::to_string(member) : membership.rank_text(rank)) + " (pid " + std::to_string(pid) +
         ")";
}

}  // namespace

Status Engine::create(EngineOptions options, Membership first, std::unique_ptr<Engine>* out) {
  if (Status status = check_options(options, first); !status) return status;
  std::unique_ptr<Engine> engine(new Engine(std::move(options)));
  if (Status status = engine->open(std::move(first)); !status) return status;
  *out = std::move(engine);
  return Status::ok();
}

Status Engine::open(Membership first) {
  if (Status status = job_.open(); !status) return status;
  job_.regroup(first.local_members(), job_.options().tokens);
  if (Status status = open_generation(std::move(first), nullptr); !status) return status;
  server_ = std::make_unique<ChannelServer>(job_.options().data_socket, static_cast<ChannelHandler*>(this));
  return server_->start();
}

Status Engine::open_generation(Membership membership, const Generation* last) {
  auto opened = std::make_shared<Generation>(&job_, std::move(membership), last);
  if (Status status = opened->open(); !status) return status;
  {
    const Lock lock(generation_mutex_);
    generation_ = std::move(opened);
  }
  job_.page().tell_change();
  return Status::ok();
}

std::shared_ptr<Generation> Engine::generation() const {
  const Lock lock(generation_mutex_);
  return generation_;
}

Status Engine::regroup(Membership next, const Tokens& tokens) {
  const Lock lock(lifecycle_mutex_);
  const Lock abort_later(regroup_mutex_);
  if (closed_) return {Code::kInvalid, "Engine: it is closed"};
  if (!job_.options().elastic) return {Code::kInvalid, "Engine: it is not elastic, so no generation follows its first"};
  const std::shared_ptr<Generation> last = generation();
  if (const std::string error = last->error(); !error.empty()) {
    return {Code::kInvalid, "Engine: the job has failed, so no generation follows: " + error};
  }
  if (Status status = check_next(next, last->membership(), tokens); !status) return status;
  last->retire("generation " + std::to_string(last->membership().generation) + " of this job has ended: generation " +
               std::to_string(next.generation) + " follows");
  last->close();
  const std::vector<int> members = next.local_members();
  job_.regroup(members, tokens);
  job_.residuals().carry_over(last->membership().all_members(), next.all_members());
  const Status status = open_generation(std::move(next), last.get());
  // Those that went away meanwhile: either we see it here, or the server's thread sees the new generation.
  for (const int member : members) note_gone(member, job_.ranks().phase(member));
  return status;
}

void Engine::abort(const std::string& reason) {
  const Lock lock(regroup_mutex_);
  generation()->abort(reason);
}

void Engine::close() {
  const Lock lock(lifecycle_mutex_);
  if (closed_) return;
  closed_ = true;
  const std::shared_ptr<Generation> last = generation();
  if (last == nullptr) return;  // it could not be opened
  // In the order in which work flows: the reason, nobody new, what is running, what it ran on.
  last->end("the node daemon has closed the engine of this job: the job is over or was stopped");
  server_.reset();
  last->close();
  job_.close();
}

Status Engine::join(uint32_t member, const uint8_t* token, pid_t pid, Fd descriptors[3]) {
  const std::shared_ptr<Generation> present = generation();
  if (const std::string error = present->error(); !error.empty()) return {Code::kAborted, error};
  if (Status status = job_.ranks().join(member, token, pid, &descriptors[2]); !status) return status;
  descriptors[0] = duplicate(job_.page().descriptor());
  descriptors[1] = duplicate(present->page());
  job_.events().tell("joined", static_cast<int>(member), "process " + std::to_string(pid));
  return Status::ok();
}

Status Engine::enter(int member, uint64_t after, Fd* descriptor) {
  const std::shared_ptr<Generation> present = generation();
  if (const std::string error = present->error(); !error.empty()) return {Code::kAborted, error};
  const Membership& membership = present->membership();
  if (membership.generation <= after) return {Code::kTimeout, "there is no next generation yet"};
  if (membership.rank_of(member) < 0) {
    return {Code::kUnavailable,
            "generation " + std::to_string(membership.generation) + " of this job goes on without this process"};
  }
  *descriptor = duplicate(present->page());
  return descriptor->valid() ? Status::ok() : Status(Code::kResource, "no descriptor is left for a page");
}

Status Engine::require(int member, uint64_t bytes) {
  return job_.budget().require(member, bytes);
}

Status Engine::alloc(int member, uint64_t bytes, Fd* descriptor, uint64_t* id, uint64_t* size) {
  if (generation()->membership().rank_of(member) < 0) {
    return {Code::kInvalid, "alloc: this process is not in the present generation of the job"};
  }
  if (Status status = job_.budget().allow(member, bytes); !status) return status;
  const Status status = job_.segments().alloc(member, bytes, descriptor, id, size);
  if (status) job_.budget().took(member, *size);
  return status;
}

Status Engine::free_segment(int member, uint64_t id) {
  return job_.segments().free(member, id);
}

Status Engine::declare(int member, uint64_t comm, const std::vector<int>& ranks) {
  return generation()->declare(member, comm, ranks);
}

Status Engine::destroy(int member, uint64_t comm) {
  return generation()->destroy(member, comm);
}

void Engine::left(int member) {
  const bool known = job_.ranks().set_phase(member, Phase::kLeft);
  job_.segments().free_all(member);
  job_.events().tell("left", member, "");
  if (known) note_gone(member, Phase::kLeft);
}

void Engine::lost(int member, pid_t pid) {
  const bool known = job_.ranks().set_phase(member, Phase::kLost);
  const std::string who = process_text(generation()->membership(), member, pid);
  job_.events().tell("lost", member, who + " went away without leaving");
  if (known) note_gone(member, Phase::kLost);
  job_.segments().free_all(member);  // last: what it had submitted must not be taken for a mistake
}

// After its phase was set. A member that is in no generation any more is nobody's loss.
void Engine::note_gone(int member, Phase phase) {
  const std::shared_ptr<Generation> present = generation();
  const Membership& membership = present->membership();
  if (membership.rank_of(member) < 0) return;
  if (phase == Phase::kLeft) {
    present->await_no_more(member);
    job_.page().ring_doorbell();
  } else if (phase == Phase::kLost) {
    const std::string who = process_text(membership, member, job_.ranks().pid(member));
    present->lose(
        {who + " went away without leaving: it crashed, was killed, or ended in the middle of the job", member, -1});
  }
}

void Engine::bad_connection() {
  job_.counters().bad_connections.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace bagua
