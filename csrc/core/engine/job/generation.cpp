#include "engine/job/generation.h"

#include <utility>

#include "base/clock.h"
#include "engine/remote/host_executor.h"

namespace bagua {

namespace {

constexpr int64_t kLookNs = 100 * kNsPerMs;  // for a description: better late knowledge than a late answer
constexpr int64_t kTakeNs = 10 * kNsPerS;    // the dispatcher may be reducing large vectors meanwhile

}  // namespace

Generation::Generation(JobState* job, Membership membership, const Generation* last)
    : state_(job, std::move(membership), last == nullptr ? nullptr : &last->state_),
      network_(&state_,
               [this](uint32_t comm, uint64_t instance, int host) { return registry_.clash(comm, instance, host); }),
      registry_(state_.membership(), [this](Communicator* comm) { prepare(comm); }),
      dispatcher_(&state_, &registry_) {}

Status Generation::open() {
  if (Status status = state_.open(); !status) return status;
  if (Status status = network_.open(); !status) return status;
  registry_.open();
  dispatcher_.start();
  return Status::ok();
}

void Generation::prepare(Communicator* comm) {
  if (comm->room != 0) state_.open_room(comm->room);
  if (comm->hosts() == 1) return;
  comm->executor = std::make_shared<HostExecutor>(&state_, &network_, comm);
  comm->executor->start();
}

Status Generation::set_peers(const std::vector<std::string>& addresses) {
  if (Status status = network_.set_peers(addresses); !status) return status;
  for (const auto& comm : registry_.all()) {
    if (comm->executor != nullptr) comm->executor->wake();
  }
  return Status::ok();
}

std::string Generation::waiting(int64_t longer_than_ns) {
  if (state_.over()) return "";
  dispatcher_.look(kLookNs);
  const int64_t now = now_ns();
  std::string text;
  for (const auto& comm : registry_.all()) {
    text += comm->describe(now, now - longer_than_ns);
    if (comm->executor != nullptr) text += comm->executor->describe(now - longer_than_ns);
  }
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

// The rank of a member; an error if nobody can use its communicators.
Status Generation::check(int member, int* rank) const {
  if (state_.suspended()) return {Code::kRegrouped, state_.loss().text};
  if (state_.over()) return {Code::kAborted, state_.loss().text};
  *rank = membership().rank_of(member);
  if (*rank >= 0) return Status::ok();
  return {Code::kInvalid,
          "member " + std::to_string(member) + " is not in generation " + std::to_string(membership().generation)};
}

Status Generation::declare(int member, uint64_t comm, const std::vector<int>& ranks, uint32_t* room) {
  int rank = -1;
  if (Status status = check(member, &rank); !status) return status;
  const Status status = registry_.declare(rank, comm, ranks, room);
  if (status.code() == Code::kAborted) state_.fail(status.message());  // other members may wait for this rank already
  return status;
}

Status Generation::destroy(int member, uint64_t comm) {
  int rank = -1;
  if (Status status = check(member, &rank); !status) return status;
  std::shared_ptr<Communicator> dropped;
  dispatcher_.look(kTakeNs);  // what the rank submitted before belongs to the communicator that it destroys now
  if (Status status = registry_.destroy(rank, comm, &dropped); !status) return status;
  if (dropped != nullptr) drop(dropped);
  return Status::ok();
}

void Generation::take_submitted(int member) {
  for (const GenerationState::Local& local : state_.locals()) {
    if (local.port->member == member && RankTable::is_busy(*local.port)) dispatcher_.look(kTakeNs);
  }
}

void Generation::drop(const std::shared_ptr<Communicator>& comm) {
  for (const Operation& operation : comm->drain()) {
    RankTable::complete(operation, operation.submitted_ns, state_.outcome());
  }
  if (comm->executor != nullptr) comm->executor->begin_close();
}

// In the order in which work flows: nothing new, what is running, what it ran on.
void Generation::close() {
  if (!state_.over()) state_.end("generation " + std::to_string(membership().generation) + " of this job has ended");
  dispatcher_.stop();
  close_executors();
  network_.stop();
}

void Generation::close_executors() {
  const std::vector<std::shared_ptr<Communicator>> comms = registry_.close();
  for (const auto& comm : comms) {
    if (comm->executor != nullptr) comm->executor->begin_close();
  }
  for (const auto& comm : comms) {
    if (comm->executor != nullptr) comm->executor->close();
  }
}

}  // namespace bagua
