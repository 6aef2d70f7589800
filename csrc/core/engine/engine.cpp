#include "engine/engine.h"

#include <algorithm>
#include <utility>

#include "base/sha256.h"

namespace bagua {

Status Engine::create(EngineOptions options, Membership first, std::unique_ptr<Engine>* out) {
  if (Status status = check_options(options, first); !status) return status;
  std::unique_ptr<Engine> engine(new Engine(std::move(options), first));
  if (Status status = engine->open(std::move(first)); !status) return status;
  *out = std::move(engine);
  return Status::ok();
}

Status Engine::open(Membership first) {
  if (Status status = job_.open(); !status) return status;
  if (Status status = open_generation(std::move(first)); !status) return status;
  server_ = std::make_unique<ChannelServer>(job_.options().data_socket, static_cast<ChannelHandler*>(this));
  return server_->start();
}

Status Engine::open_generation(Membership membership) {
  auto opened = std::make_shared<Generation>(&job_, std::move(membership));
  if (Status status = opened->open(); !status) return status;
  const Lock lock(generation_mutex_);
  generation_ = std::move(opened);
  return Status::ok();
}

std::shared_ptr<Generation> Engine::generation() const {
  const Lock lock(generation_mutex_);
  return generation_;
}

Status Engine::regroup(Membership next) {
  const Lock lock(lifecycle_mutex_);
  if (closed_) return {Code::kInvalid, "Engine: it is closed"};
  const std::shared_ptr<Generation> last = generation();
  if (Status status = check_next(next, last->membership()); !status) return status;
  for (const int rank : job_.local_ranks()) {
    const Phase phase = job_.ranks().phase(rank);
    if (phase == Phase::kAbsent || phase == Phase::kJoined) continue;
    return {Code::kInvalid, "Engine: rank " + std::to_string(rank) + " has gone: no generation can have it"};
  }
  last->end("generation " + std::to_string(last->membership().generation) + " of this job has ended: generation " +
            std::to_string(next.generation) + " follows");
  last->close();
  job_.residuals().carry_over();
  return open_generation(std::move(next));
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

Status Engine::join(uint32_t rank, const uint8_t* token, pid_t pid, int descriptors[2]) {
  const auto& tokens = job_.options().tokens;
  const auto found = std::find_if(tokens.begin(), tokens.end(),
                                  [rank](const auto& entry) { return static_cast<uint32_t>(entry.first) == rank; });
  if (found == tokens.end() || !equal_constant_time(found->second.data(), token, kTokenBytes)) {
    return {Code::kInvalid, "the node daemon refuses this process: it is not rank " + std::to_string(rank) +
                                " of this job (wrong token)"};
  }
  const std::shared_ptr<Generation> present = generation();
  if (present->failed()) return {Code::kAborted, present->error()};
  if (Status status = job_.ranks().join(static_cast<int>(rank), pid, &descriptors[1]); !status) return status;
  descriptors[0] = job_.page().descriptor();
  job_.events().tell("joined", static_cast<int>(rank), "process " + std::to_string(pid));
  return Status::ok();
}

Status Engine::require(int rank, uint64_t bytes) {
  return job_.budget().require(rank, bytes);
}

Status Engine::alloc(int rank, uint64_t bytes, Fd* descriptor, uint64_t* id, uint64_t* size) {
  if (Status status = job_.budget().allow(rank, bytes); !status) return status;
  const Status status = job_.segments().alloc(rank, bytes, descriptor, id, size);
  if (status) job_.budget().took(rank, *size);
  return status;
}

Status Engine::free_segment(int rank, uint64_t id) {
  return job_.segments().free(rank, id);
}

Status Engine::declare(int rank, uint64_t comm, const std::vector<int>& members) {
  return generation()->declare(rank, comm, members);
}

Status Engine::destroy(int rank, uint64_t comm) {
  return generation()->destroy(rank, comm);
}

void Engine::left(int rank) {
  job_.ranks().set_phase(rank, Phase::kLeft);
  job_.segments().free_all(rank);
  job_.events().tell("left", rank, "");
  job_.await_no_more(rank);
  job_.page().ring_doorbell();
}

void Engine::lost(int rank, pid_t pid) {
  job_.ranks().set_phase(rank, Phase::kLost);
  job_.segments().free_all(rank);
  const std::string who = "rank " + std::to_string(rank) + " (pid " + std::to_string(pid) + ")";
  job_.events().tell("lost", rank, who + " went away without leaving");
  generation()->fail(who + " went away without leaving: it crashed, was killed, or ended in the middle of the job");
}

void Engine::bad_connection() {
  job_.counters().bad_connections.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace bagua
