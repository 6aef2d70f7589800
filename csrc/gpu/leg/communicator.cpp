#include "gpu/leg/communicator.h"

#include <poll.h>

#include "base/clock.h"

namespace bagua::device {

namespace {
constexpr int64_t kDrainNs = 10 * kNsPerS;
constexpr size_t kNamed = 16;  // ranks named in a message
}  // namespace

std::vector<int> Members::neighbours() const {
  std::vector<int> found;
  for (int i = 0; i < size(); ++i) {
    if (host[static_cast<size_t>(i)] == host[static_cast<size_t>(index)]) found.push_back(i);
  }
  return found;
}

std::string Members::names() const {
  std::string found;
  for (size_t i = 0; i < ranks.size() && i < kNamed; ++i) found += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  return found + (ranks.size() > kNamed ? ", ..." : "");
}

bool Members::regular() const {
  std::map<int, int> there;
  for (const int h : host) ++there[h];
  for (const auto& [h, count] : there) {
    if (count != there.begin()->second || count < 2) return false;
  }
  return there.size() > 1;
}

Communicator::Communicator(Runtime* runtime, OperationTable* table, Watcher* watcher, Members members)
    : runtime_(runtime),
      table_(table),
      watcher_(watcher),
      members_(std::move(members)),
      in_flight_(runtime, table, members_.names()) {}

Communicator::~Communicator() = default;

Status Communicator::submit(Operation* operation, CudaStream stream) {
  const CudaRuntime& cuda = runtime_->libraries.cuda;
  CudaEvent begin = nullptr;
  Status status = runtime_->take_event(&begin);
  if (status) status = runtime_->cuda(cuda.event_record(begin, stream), "recording the caller's stream");
  if (status) {
    const Lock lock(mutex_);
    status = submit_on(route_of(*operation), operation, begin);
  }
  runtime_->put_event(begin);
  // A failure here leaves NCCL's communicators, or the order of a staged route, undefined.
  if (status || runtime_->failure.failed()) return status;
  runtime_->fail_with_cause(name_of(*operation) + ": " + status.message());
  return runtime_->failure.status();
}

Route Communicator::route_of(const Operation& operation) const {
  if (route_ == Route::kFlat && flat_->takes(operation)) return Route::kFlat;
  if (route_ == Route::kHierarchical && hierarchical_->takes(operation)) return Route::kHierarchical;
  return Route::kStaged;
}

Status Communicator::check(const Operation& operation) const {
  const auto found = excluded_.impossible.find(Route::kStaged);
  if (found == excluded_.impossible.end() || route_of(operation) != Route::kStaged) return Status::ok();
  return {Code::kUnavailable, name_of(operation) +
                                  " goes through shared memory, as NCCL does not take it (see the "
                                  "table of routes in csrc/gpu/leg/README.md), and that is not possible: " +
                                  found->second};
}

Status Communicator::submit_on(Route route, Operation* operation, CudaEvent begin) {
  LegCounters& counters = runtime_->counters;
  counters.ops.fetch_add(1, std::memory_order_relaxed);
  counters.bytes.fetch_add(operation->src_bytes, std::memory_order_relaxed);
  if (route == Route::kStaged) {
    counters.ops_staged.fetch_add(1, std::memory_order_relaxed);
    StagedRoute* staged = nullptr;
    if (Status status = staged_for(*operation, &staged); !status) return status;
    return staged->submit(operation, begin);
  }
  if (route == Route::kFlat) counters.ops_flat.fetch_add(1, std::memory_order_relaxed);
  if (route == Route::kHierarchical) counters.ops_hierarchical.fetch_add(1, std::memory_order_relaxed);
  operation->started_ns.store(now_ns(), std::memory_order_relaxed);
  Status status = in_flight_.begin(operation);
  if (status)
    status = route == Route::kFlat ? flat_->submit(*operation, begin) : hierarchical_->submit(*operation, begin);
  in_flight_.enqueued(operation, status.is_ok());
  return status;
}

// Finds the staged route of an operation: collectives of a communicator have one order, and so do the messages from a
// rank to another.
Status Communicator::staged_for(const Operation& operation, StagedRoute** staged) {
  const Kind kind = operation.kind();
  const bool pair = kind == Kind::kSend || kind == Kind::kRecv;
  const int64_t key = pair ? 2 * int64_t{operation.descriptor.root} + (kind == Kind::kSend ? 1 : 0) : -1;
  std::unique_ptr<StagedRoute>& slot = staged_[key];
  if (slot == nullptr) {
    auto made = std::make_unique<StagedRoute>(runtime_, [this](Operation* done) { table_->retire(done); });
    if (Status status = made->open(); !status) return status;
    slot = std::move(made);
  }
  *staged = slot.get();
  return Status::ok();
}

bool Communicator::settled() const {
  return (flat_ == nullptr || flat_->idle()) && (hierarchical_ == nullptr || hierarchical_->idle());
}

bool Communicator::quiet() {
  const Lock lock(mutex_);
  bool empty = true;
  for (const auto& [key, staged] : staged_) empty = empty && staged->empty();
  return empty && settled();
}

bool Communicator::close() {
  const Lock lock(mutex_);
  const std::string number = std::to_string(members_.comm);
  const WaitClock::Scope waiting(&runtime_->wait_clock,
                                 "Communicator " + number + " is given up, and has operations under way.");
  for (const auto& [key, staged] : staged_) staged->wait_empty();
  // CUDA has no wait that another thread could interrupt, so this polls. After a failure, aborting NCCL frees the
  // streams.
  while (!settled() && !runtime_->failure.failed()) poll(nullptr, 0, 1);
  drop_nccl();
  const int64_t deadline = now_ns() + kDrainNs;
  while (!settled() && now_ns() < deadline) poll(nullptr, 0, 1);
  bool all = settled();
  hierarchical_.reset();
  for (auto& [key, staged] : staged_) all = staged->close() && all;
  all = in_flight_.clear() && all;
  if (!all) {
    for (auto& [key, staged] : staged_) static_cast<void>(staged.release());  // leaked, because CUDA may still use them
    static_cast<void>(flat_.release());
  }
  staged_.clear();
  flat_.reset();
  HostError ignored;
  if (across_ != 0) static_cast<void>(runtime_->host.destroy_comm(runtime_->host.client, across_, &ignored));
  across_ = 0;
  return all;
}

void Communicator::drop_nccl() {
  Handles all;
  for (const auto& [route, handles] : handles_) all.insert(all.end(), handles.begin(), handles.end());
  handles_.clear();
  for (const auto& handle : all) watcher_->remove(handle);
  if (runtime_->failure.failed()) {
    abort_together(runtime_, all);
  } else {
    destroy_together(runtime_, all);
  }
}

}  // namespace bagua::device
