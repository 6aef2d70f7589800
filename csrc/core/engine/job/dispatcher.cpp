#include "engine/job/dispatcher.h"

#include <algorithm>

#include "base/clock.h"
#include "channel/futex.h"
#include "engine/remote/host_executor.h"

namespace bagua {

namespace {

constexpr int64_t kLongestSleepNs =
    500 * kNsPerMs;  // a rank that scribbles on the doorbell costs latency, not progress

}  // namespace

Dispatcher::Dispatcher(GenerationState* state, Registry* registry)
    : state_(state),
      page_(&state->job().page),
      registry_(registry),
      spins_(std::thread::hardware_concurrency() > 2 * state->locals().size() ? 2000 : 0),
      circle_(state, registry) {}

void Dispatcher::start() {
  local_ = std::make_unique<LocalExecutor>(state_);
  thread_ = std::thread([this] { run(); });
}

void Dispatcher::stop() {
  stopping_.store(true);
  if (!thread_.joinable()) return;
  page_->ring_doorbell();
  thread_.join();
  local_.reset();
  rounds_.fetch_add(1);
  futex_wake(&rounds_);  // those who look see that it has ended
}

void Dispatcher::run() {
  while (!stopping_.load()) {
    const uint32_t seen = page_->get()->doorbell.load();
    const std::vector<int> departed = departed_ranks();  // before taking: all that they submitted is then taken
    const bool worked = take_all();
    registry_->reap();
    rounds_.fetch_add(1);
    if (lookers_.load() > 0) futex_wake(&rounds_);
    if (state_->over()) {
      flush();
    } else {
      check_departed(departed);
      if (!worked) check_circle();
    }
    if (!worked) sleep(seen);
  }
  take_all();
  flush();
}

void Dispatcher::look(int64_t longest_ns) {
  const int64_t deadline = now_ns() + longest_ns;
  const uint32_t before = rounds_.load();
  lookers_.fetch_add(1);
  // The round under way may have passed a rank by: the one after it has not.
  for (uint32_t seen = before; seen - before < 2 && !stopping_.load() && now_ns() < deadline; seen = rounds_.load()) {
    page_->ring_doorbell();
    futex_wait(&rounds_, seen, deadline);
  }
  lookers_.fetch_sub(1);
}

void Dispatcher::sleep(uint32_t seen) {
  JobPage* page = page_->get();
  for (int spin = 0; spin < spins_; ++spin) {
    if (page->doorbell.load(std::memory_order_relaxed) != seen) return;
    spin_pause();
  }
  const uint32_t mine = state_->membership().lobby ? 2 : 1;
  page->sleeping.fetch_or(mine);  // sequentially consistent, as the submitter's side: one of the two sees the other
  if (page->doorbell.load() == seen) futex_wait(&page->doorbell, seen, now_ns() + kLongestSleepNs);
  page->sleeping.fetch_and(~mine);
}

bool Dispatcher::take_all() {
  bool worked = false;
  std::vector<std::shared_ptr<Communicator>> touched;  // advanced when all is taken: what came in pieces runs as one
  for (const GenerationState::Local& local : state_->locals()) {
    Operation operation;
    Status status;
    while (RankTable::take(local.port.get(), &operation, &status)) {
      worked = true;
      operation.rank = local.rank;
      handle(std::move(operation), &touched);
    }
    if (!status) state_->fail(state_->membership().rank_text(local.rank) + " " + status.message());
  }
  for (const auto& comm : touched) advance(comm);
  return worked;
}

void Dispatcher::reject(const Operation& operation) const {
  RankTable::complete(operation, operation.submitted_ns, state_->outcome());
}

void Dispatcher::handle(Operation operation, std::vector<std::shared_ptr<Communicator>>* touched) {
  if (operation.generation != static_cast<uint32_t>(state_->membership().generation)) {
    return RankTable::complete(operation, operation.submitted_ns, Outcome::kRegrouped);
  }
  if (state_->over()) return reject(operation);
  std::shared_ptr<Communicator> comm;
  if (!touched->empty() && touched->back()->id() == operation.descriptor.comm && operation.descriptor.comm == 0) {
    comm = touched->back();
  } else {
    comm = registry_->find(operation.descriptor.comm, operation.rank);
  }
  operation.index = comm == nullptr ? -1 : comm->index_of(operation.rank);
  Status status;
  if (operation.index < 0) {
    status = {Code::kInvalid, "rank " + std::to_string(operation.rank) + " called an operation of " +
                                  comm_name(operation.descriptor.comm) + ", of which it is no member here"};
  } else {
    status = resolve(&operation, comm->size(), state_->job().segments());
  }
  if (!status) {
    state_->fail(status.message());
    return reject(operation);
  }
  comm->push(std::move(operation));
  if (std::find(touched->begin(), touched->end(), comm) == touched->end()) touched->push_back(std::move(comm));
}

void Dispatcher::advance(const std::shared_ptr<Communicator>& comm) {
  Status mismatch;
  std::vector<Collective> operations;
  Collective collective;
  while (comm->next_collective(&collective, &mismatch)) {
    if (!operations.empty() && (!mismatch || !continues(operations.back(), collective))) {
      local_->run(*comm, operations);
      operations.clear();
    }
    if (!mismatch) {
      state_->fail(mismatch.message());
      for (const Operation& part : collective.parts) reject(part);
      return;
    }
    if (state_->job().options.elastic) note_step(collective);
    if (comm->hosts() == 1) {
      operations.push_back(std::move(collective));
    } else if (!comm->executor->submit(&collective)) {
      for (const Operation& part : collective.parts) reject(part);
    }
  }
  if (!operations.empty()) local_->run(*comm, operations);
  Pair pair;
  while (comm->next_pair(&pair, &mismatch)) {
    if (mismatch) {
      local_->run(pair);
      continue;
    }
    state_->fail(mismatch.message());
    reject(pair.send);
    reject(pair.recv);
    return;
  }
  Communicator::Between one;
  while (comm->next_between(&one)) {
    const auto* half = std::get_if<SendOrRecv>(&one);
    if (!comm->executor->submit(&one) && half != nullptr) reject(half->operation);
  }
}

// All ranks of this host have called it: the time that they wait for each other is part of a step.
void Dispatcher::note_step(const Collective& operation) {
  steps_.note(operation.first().descriptor, now_ns());
  if (const int64_t median = steps_.median(); median > 0) state_->set_step_ns(median);
}

void Dispatcher::check_circle() {
  const int64_t now = now_ns();
  if (now - looked_ns_ < kNsPerS) return;
  looked_ns_ = now;
  if (const std::string words = circle_.look(now); !words.empty()) state_->fail(words);
}

std::vector<int> Dispatcher::departed_ranks() const {
  std::vector<int> departed;
  for (const auto& [rank, port] : state_->locals()) {
    if (port->phase.load(std::memory_order_acquire) == Phase::kLeft) departed.push_back(rank);
  }
  return departed;
}

void Dispatcher::check_departed(const std::vector<int>& departed) {
  if (departed.empty()) return;
  for (const auto& comm : registry_->all()) {
    const uint64_t remote = comm->executor == nullptr ? 0 : comm->executor->begun_elsewhere();
    for (const int rank : departed) {
      if (comm->executor != nullptr && comm->index_of(rank) >= 0) comm->executor->note_left(rank);
      const std::string needed_by = comm->needs(rank, remote);
      if (needed_by.empty()) continue;
      state_->fail(left_text(rank, needed_by));
      return flush();
    }
  }
}

std::string Dispatcher::left_text(int left, const std::string& needed_by) const {
  uint64_t done = 0, most = 0;
  std::string counts, farewell;
  for (const auto& [rank, port] : state_->locals()) {
    const RankChannel* channel = port->channel.load(std::memory_order_acquire);
    const uint64_t passes = channel == nullptr ? 0 : channel->passes.load(std::memory_order_relaxed);
    if (rank == left) {
      done = passes;
      farewell = port->farewell;
    }
    most = std::max(most, passes);
    counts += (counts.empty() ? "rank " : ", rank ") + std::to_string(rank) + ": " + std::to_string(passes);
  }
  const std::string who = "rank " + std::to_string(left) + " has left the job";
  if (!farewell.empty()) return who + ", but " + needed_by + " needs it. It left while it handled " + farewell;
  const std::string text = who + " in good order, but " + needed_by + " needs it: ";
  if (done >= most) return text + "did it skip an operation that the others called?";
  return text + "it had fewer batches than others. Backward passes so far: " + counts +
         ". Give all ranks as many, or train inside of bagua.join(model), which lets them have different numbers";
}

void Dispatcher::flush() {
  for (const auto& comm : registry_->all()) {
    for (const Operation& operation : comm->drain()) reject(operation);
    if (comm->executor != nullptr) comm->executor->wake();
  }
  for (const auto& comm : registry_->retired()) comm->executor->wake();
}

}  // namespace bagua
