#include "engine/engine.h"

#include <algorithm>

#include "base/clock.h"
#include "base/sha256.h"
#include "engine/host_executor.h"

namespace bagua {

namespace {

constexpr int64_t kLookNs = 100 * kNsPerMs;  // for a description: better late knowledge than a late answer
constexpr int64_t kTakeNs = 10 * kNsPerS;    // the dispatcher may be reducing large vectors meanwhile

}  // namespace

Engine::Engine(EngineOptions options)
    : state_(std::move(options)),
      ranks_(state_.options().local_ranks()),
      network_(&state_,
               [this](uint32_t comm, uint64_t instance, int host) { return registry_.clash(comm, instance, host); }),
      registry_(state_.options().hosts, state_.options().host_index, [this](Communicator* comm) { prepare(comm); }) {}

Status Engine::create(EngineOptions options, std::unique_ptr<Engine>* out) {
  if (Status status = check_options(options); !status) return status;
  std::unique_ptr<Engine> engine(new Engine(std::move(options)));
  if (Status status = engine->open(); !status) return status;
  *out = std::move(engine);
  return Status::ok();
}

Status Engine::open() {
  if (Status status = state_.open(); !status) return status;
  segments_ = std::make_unique<SegmentTable>(&state_.counters().segment_bytes);
  budget_ = std::make_unique<Budget>(state_.options().memory_limit, state_.options().local_ranks().size(),
                                     &state_.counters().segment_bytes);
  if (Status status = network_.open(); !status) return status;
  registry_.open();
  dispatcher_ = std::make_unique<Dispatcher>(&state_, &ranks_, &registry_, segments_.get());
  dispatcher_->start();
  server_.reset(new ChannelServer(state_.options().data_socket, static_cast<ChannelHandler*>(this)));
  return server_->start();
}

void Engine::prepare(Communicator* comm) {
  if (comm->hosts() == 1) return;
  comm->executor = std::make_shared<HostExecutor>(&state_, &ranks_, &network_, comm);
  comm->executor->start();
}

Status Engine::set_peers(const std::vector<std::string>& addresses) {
  if (Status status = network_.set_peers(addresses); !status) return status;
  for (const auto& comm : registry_.all()) {
    if (comm->executor != nullptr) comm->executor->wake();
  }
  return Status::ok();
}

std::string Engine::waiting(int64_t longer_than_ns) const {
  if (state_.failed()) return "";
  take_submitted(kLookNs);
  const int64_t now = now_ns();
  std::string text;
  for (const auto& comm : registry_.all()) {
    text += comm->describe(now, now - longer_than_ns);
    if (comm->executor != nullptr) text += comm->executor->describe(now - longer_than_ns);
  }
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

void Engine::close() {
  std::lock_guard<std::mutex> lock(lifecycle_mutex_);
  if (closed_) return;
  closed_ = true;
  // In the order in which work flows: nobody new, nothing new, what is running, what it ran on.
  if (dispatcher_ != nullptr) {
    state_.end("the node daemon has closed the engine of this job: the job is over or was stopped");
    server_.reset();
    dispatcher_->stop();
    close_executors();
    dispatcher_.reset();
    for (const int rank : state_.options().local_ranks()) segments_->free_all(rank);
    ranks_.close();
  }
  network_.stop();
  state_.close_page();
}

void Engine::close_executors() {
  const std::vector<std::shared_ptr<Communicator>> comms = registry_.clear();
  for (const auto& comm : comms) {
    if (comm->executor != nullptr) comm->executor->begin_close();
  }
  for (const auto& comm : comms) {
    if (comm->executor != nullptr) comm->executor->close();
  }
}

Status Engine::join(uint32_t rank, const uint8_t* token, pid_t pid, int descriptors[2]) {
  const auto& tokens = state_.options().tokens;
  const auto found = std::find_if(tokens.begin(), tokens.end(),
                                  [rank](const auto& entry) { return static_cast<uint32_t>(entry.first) == rank; });
  if (found == tokens.end() || !equal_constant_time(found->second.data(), token, kTokenBytes)) {
    return {Code::kInvalid, "the node daemon refuses this process: it is not rank " + std::to_string(rank) +
                                " of this job (wrong token)"};
  }
  if (state_.failed()) return {Code::kAborted, state_.error()};
  if (Status status = ranks_.join(static_cast<int>(rank), pid, &descriptors[1]); !status) return status;
  descriptors[0] = state_.page_descriptor();
  state_.tell("joined", static_cast<int>(rank), "process " + std::to_string(pid));
  return Status::ok();
}

Status Engine::require(int rank, uint64_t bytes) {
  return budget_->require(rank, bytes);
}

Status Engine::alloc(int rank, uint64_t bytes, Fd* descriptor, uint64_t* id, uint64_t* size) {
  if (Status status = budget_->allow(rank, bytes); !status) return status;
  const Status status = segments_->alloc(rank, bytes, descriptor, id, size);
  if (status) budget_->took(rank, *size);
  return status;
}

Status Engine::free_segment(int rank, uint64_t id) {
  return segments_->free(rank, id);
}

Status Engine::declare(int rank, uint64_t comm, const std::vector<int>& members) {
  if (state_.failed()) return {Code::kAborted, state_.error()};
  const Status status = registry_.declare(rank, comm, members);
  if (status.code() == Code::kAborted) state_.fail(status.message());  // other members may wait for this rank already
  return status;
}

void Engine::take_submitted(int64_t longest_ns) const {
  // Whoever holds it closes the engine: then nothing waits for long.
  std::unique_lock<std::mutex> lock(lifecycle_mutex_, std::try_to_lock);
  if (lock.owns_lock() && !closed_ && dispatcher_ != nullptr) dispatcher_->look(longest_ns);
}

Status Engine::destroy(int rank, uint64_t comm) {
  std::shared_ptr<Communicator> dropped;
  take_submitted(kTakeNs);  // what the rank submitted before belongs to the communicator that it destroys now
  if (Status status = registry_.destroy(rank, comm, &dropped); !status) return status;
  if (dropped != nullptr) retire(dropped);
  return Status::ok();
}

void Engine::retire(const std::shared_ptr<Communicator>& comm) {
  for (const Operation& operation : comm->drain()) ranks_.complete(operation, operation.submitted_ns, false);
  if (comm->executor == nullptr) return;
  registry_.retire(comm);
  comm->executor->begin_close();
}

void Engine::left(int rank) {
  ranks_.set_phase(rank, Phase::kLeft);
  segments_->free_all(rank);
  state_.tell("left", rank, "");
  state_.await_no_more(rank);
  state_.ring_doorbell();
}

void Engine::lost(int rank, pid_t pid) {
  ranks_.set_phase(rank, Phase::kLost);
  segments_->free_all(rank);
  const std::string who = "rank " + std::to_string(rank) + " (pid " + std::to_string(pid) + ")";
  state_.tell("lost", rank, who + " went away without leaving");
  state_.fail(who + " went away without leaving: it crashed, was killed, or ended in the middle of the job");
}

void Engine::bad_connection() {
  state_.counters().bad_connections.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace bagua
