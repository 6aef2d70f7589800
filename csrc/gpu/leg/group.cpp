#include "gpu/leg/group.h"

#include <poll.h>

#include "base/clock.h"

namespace bagua::device {

namespace {
constexpr int64_t kDrainNs = 10 * kNsPerS;
constexpr size_t kNamed = 16;  // ranks, in a message
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

Group::Group(Runtime* runtime, OperationTable* table, Watcher* watcher, Members members)
    : runtime_(runtime),
      table_(table),
      watcher_(watcher),
      members_(std::move(members)),
      carried_(runtime, table, members_.names()) {}

Group::~Group() = default;

Status Group::submit(Operation* operation, CudaStream stream) {
  const CudaRuntime& cuda = runtime_->libraries.cuda;
  CudaEvent begin = nullptr;
  Status status = runtime_->take_event(&begin);
  if (status) status = runtime_->cuda(cuda.event_record(begin, stream), "recording the caller's stream");
  if (status) {
    std::lock_guard<std::mutex> lock(mutex_);
    status = submit_on(route_of(*operation), operation, begin);
  }
  runtime_->put_event(begin);
  // What fails here has left the communicators of NCCL, or the order of a lane, in an unknown state.
  if (status || runtime_->failure.failed()) return status;
  runtime_->fail_with_cause(name_of(*operation) + ": " + status.message());
  return runtime_->failure.status();
}

Route Group::route_of(const Operation& operation) const {
  if (route_ == Route::kFlat && flat_->takes(operation)) return Route::kFlat;
  if (route_ == Route::kHierarchical && hierarchical_->takes(operation)) return Route::kHierarchical;
  return Route::kStaged;
}

Status Group::check(const Operation& operation) const {
  const auto found = excluded_.impossible.find(Route::kStaged);
  if (found == excluded_.impossible.end() || route_of(operation) != Route::kStaged) return Status::ok();
  return {Code::kUnavailable, name_of(operation) +
                                  " goes through shared memory, as NCCL does not take it (see the "
                                  "table of routes in csrc/gpu/leg/README.md), and that is not possible: " +
                                  found->second};
}

Status Group::submit_on(Route route, Operation* operation, CudaEvent begin) {
  LegCounters& counters = runtime_->counters;
  counters.ops.fetch_add(1, std::memory_order_relaxed);
  counters.bytes.fetch_add(operation->src_bytes, std::memory_order_relaxed);
  if (route == Route::kStaged) {
    counters.ops_staged.fetch_add(1, std::memory_order_relaxed);
    Lane* lane = nullptr;
    if (Status status = lane_for(*operation, &lane); !status) return status;
    return lane->submit(operation, begin);
  }
  if (route == Route::kFlat) counters.ops_flat.fetch_add(1, std::memory_order_relaxed);
  if (route == Route::kHierarchical) counters.ops_hierarchical.fetch_add(1, std::memory_order_relaxed);
  operation->started_ns.store(now_ns(), std::memory_order_relaxed);
  Status status = carried_.begin(operation);
  if (status)
    status = route == Route::kFlat ? flat_->submit(*operation, begin) : hierarchical_->submit(*operation, begin);
  carried_.enqueued(operation, status.is_ok());
  return status;
}

// Collectives of one communicator come in one order, and so do the messages from one rank to another.
Status Group::lane_for(const Operation& operation, Lane** lane) {
  const Kind kind = operation.kind();
  const bool pair = kind == Kind::kSend || kind == Kind::kRecv;
  const int64_t key = pair ? 2 * int64_t{operation.descriptor.root} + (kind == Kind::kSend ? 1 : 0) : -1;
  std::unique_ptr<Lane>& slot = lanes_[key];
  if (slot == nullptr) {
    auto made = std::make_unique<Lane>(runtime_, [this](Operation* done) { table_->retire(done); });
    if (Status status = made->open(); !status) return status;
    slot = std::move(made);
  }
  *lane = slot.get();
  return Status::ok();
}

bool Group::settled() const {
  return (flat_ == nullptr || flat_->idle()) && (hierarchical_ == nullptr || hierarchical_->idle());
}

bool Group::quiet() {
  std::lock_guard<std::mutex> lock(mutex_);
  bool empty = true;
  for (const auto& [key, lane] : lanes_) empty = empty && lane->empty();
  return empty && settled();
}

bool Group::close() {
  std::lock_guard<std::mutex> lock(mutex_);
  const std::string number = std::to_string(members_.comm);
  const Waits::Here waiting(&runtime_->waits, "Communicator " + number + " is given up, and has operations under way.");
  for (const auto& [key, lane] : lanes_) lane->wait_empty();
  // CUDA has no wait that another thread could end. After a failure the end of NCCL frees the streams.
  while (!settled() && !runtime_->failure.failed()) poll(nullptr, 0, 1);
  drop_nccl();
  const int64_t deadline = now_ns() + kDrainNs;
  while (!settled() && now_ns() < deadline) poll(nullptr, 0, 1);
  bool all = settled();
  hierarchical_.reset();
  for (auto& [key, lane] : lanes_) all = lane->close() && all;
  all = carried_.clear() && all;
  if (!all) {
    for (auto& [key, lane] : lanes_) static_cast<void>(lane.release());  // CUDA may still use them
    static_cast<void>(flat_.release());
  }
  lanes_.clear();
  flat_.reset();
  HostError ignored;
  if (across_ != 0) static_cast<void>(runtime_->host.destroy_comm(runtime_->host.client, across_, &ignored));
  across_ = 0;
  return all;
}

void Group::drop_nccl() {
  Handles all;
  for (const auto& [route, handles] : handles_) all.insert(all.end(), handles.begin(), handles.end());
  handles_.clear();
  for (const auto& handle : all) watcher_->remove(handle);
  if (runtime_->failure.failed()) {
    abort_together(runtime_, all);
  } else {
    for (const auto& handle : all) handle->destroy();
  }
}

}  // namespace bagua::device
