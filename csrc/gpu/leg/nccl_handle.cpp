#include "gpu/leg/nccl_handle.h"

#include <sched.h>

#include <chrono>
#include <thread>
#include <utility>

#include "base/clock.h"

namespace bagua::device {

namespace {

constexpr int64_t kEagerNs = 500'000, kSoonNs = 20 * kNsPerMs;  // how long NCCL's state is polled fast
constexpr std::chrono::microseconds kSoon{50}, kLate{1000};     // between later polls
constexpr int64_t kFinalizeNs = 10 * kNsPerS;
constexpr std::chrono::milliseconds kLeaveNccl{1000};
constexpr std::chrono::milliseconds kLeaveBlocking{100};  // a caller that is longer in NCCL waits for the abort
constexpr std::chrono::seconds kAbort{10}, kDestroy{12};

// Waits before the next poll: NCCL's state can only be polled. A group takes some 100 us on NCCL's own thread, but
// longer if it has to make connections.
void pause(int64_t since_ns) {
  const int64_t waited = now_ns() - since_ns;
  if (waited < kEagerNs) {
    sched_yield();
  } else {
    std::this_thread::sleep_for(waited < kSoonNs ? kSoon : kLate);
  }
}

NcclResult state_of(const Runtime& runtime, NcclComm comm) {
  NcclResult state = kNcclOk;
  const NcclResult code = runtime.libraries.nccl.async_error(comm, &state);
  return code == kNcclOk ? state : code;
}

// Ends a communicator in good order, or aborts it after 10 s. The call waits as long as NCCL does if the communicator
// blocks.
void give_back(Runtime* runtime, NcclComm comm) {
  const Nccl& nccl = runtime->libraries.nccl;
  const int64_t begin = now_ns(), deadline = begin + kFinalizeNs;
  NcclResult code = nccl.finalize(comm);
  while (code == kNcclInProgress && now_ns() < deadline && !runtime->failure.failed()) {
    pause(begin);
    code = state_of(*runtime, comm);
  }
  if (code == kNcclOk) {
    nccl.destroy(comm);
    return;
  }
  runtime->counters.aborts.fetch_add(1);
  nccl.abort(comm);
}

}  // namespace

Status NcclHandle::create(const NcclId& id) {
  NcclConfig config;
  NcclComm comm = nullptr;
  const NcclResult code = runtime_->libraries.nccl.init_rank(&comm, ranks_, id, rank_, &config);
  const Lock lock(mutex_);
  comm_ = comm;
  return runtime_->nccl(code, "making a communicator");
}

Status NcclHandle::divide() {
  NcclConfig config;
  config.blocking = 1;
  const NcclComm comm = begin();
  if (comm == nullptr) return aborted();
  divided_ = true;
  const NcclResult code = runtime_->libraries.nccl.split(comm, 0, rank_, &child_, &config);
  end();
  return runtime_->nccl(code, "dividing a communicator");
}

Status NcclHandle::ready(bool* over) {
  const NcclComm comm = begin();
  *over = true;
  if (comm == nullptr) return aborted();
  const NcclResult state = state_of(*runtime_, comm);
  end();
  *over = state != kNcclInProgress;
  if (state == kNcclOk && divided_ && child_ == nullptr) return {Code::kUnavailable, "NCCL: it has made no child"};
  return runtime_->nccl(state, divided_ ? "dividing a communicator" : "making a communicator");
}

std::shared_ptr<NcclHandle> NcclHandle::take_child() {
  auto child = std::make_shared<NcclHandle>(runtime_, ranks_, rank_);
  child->blocks_ = true;
  const Lock lock(child->mutex_);
  child->comm_ = std::exchange(child_, nullptr);
  return child;
}

NcclComm NcclHandle::begin() {
  Lock lock(mutex_);
  idle_.wait(lock, [this]() REQUIRES(mutex_) { return !in_use_ || comm_ == nullptr; });
  if (comm_ == nullptr || runtime_->failure.failed()) return nullptr;
  in_use_ = true;
  return comm_;
}

Status NcclHandle::aborted() const {
  const std::string why = runtime_->failure.reason();
  return {Code::kAborted, why.empty() ? "the communicator was aborted" : why};
}

void NcclHandle::end() {
  const Lock lock(mutex_);
  in_use_ = false;
  idle_.notify_all();
}

Status NcclHandle::settle(NcclComm comm, NcclResult code, const char* what) {
  // The error of a call that an abort has ended is no reason.
  if (!goes_on(code) && runtime_->failure.failed()) return runtime_->failure.status();
  if (code != kNcclInProgress) return runtime_->nccl(code, what);
  const WaitClock::Scope waiting(&runtime_->wait_clock, connects(what));
  const int64_t begin = now_ns();
  while (code == kNcclInProgress) {
    if (runtime_->failure.failed()) return runtime_->failure.status();
    pause(begin);
    code = state_of(*runtime_, comm);
  }
  return runtime_->nccl(code, what);
}

std::string NcclHandle::connects(const char* what) {
  return std::string("NCCL connects with other ranks, for ") + what + ".";
}

Status NcclHandle::async_error() {
  NcclComm comm = nullptr;
  {
    const Lock lock(mutex_);
    if (comm_ == nullptr || in_use_) return Status::ok();
    in_use_ = true;
    comm = comm_;
  }
  const NcclResult state = state_of(*runtime_, comm);
  end();
  return runtime_->nccl(state, "communication");
}

void NcclHandle::abort() {
  NcclComm comm = nullptr;
  {
    Lock lock(mutex_);
    idle_.wait_for(lock, blocks_ ? kLeaveBlocking : kLeaveNccl, [this]() REQUIRES(mutex_) { return !in_use_; });
    std::swap(comm, comm_);
    idle_.notify_all();
  }
  if (comm == nullptr) return;
  runtime_->counters.aborts.fetch_add(1);
  runtime_->libraries.nccl.abort(comm);
  // A child that nobody has used: its members did not all come to be ready.
  if (NcclComm child = std::exchange(child_, nullptr); child != nullptr) runtime_->libraries.nccl.abort(child);
}

void NcclHandle::destroy() {
  NcclComm comm = nullptr;
  {
    Lock lock(mutex_);
    idle_.wait(lock, [this]() REQUIRES(mutex_) { return !in_use_; });
    std::swap(comm, comm_);
  }
  if (comm != nullptr) give_back(runtime_, comm);
}

namespace {
// After a failure, no CUDA call may come before ncclCommAbort(): it could wait for a thread that waits for NCCL's
// kernels. ncclCommAbort() sets its abort flags before it calls CUDA. It changes the device and restores that of this
// thread, which would be GPU 0 if it were not set here.
void abort_one(const Runtime& runtime, NcclHandle* handle) {
  if (runtime.failure.failed()) return handle->abort();
  OnDevice here(runtime);
  handle->abort();
}

void destroy_one(const Runtime& runtime, NcclHandle* handle) {
  OnDevice here(runtime);
  handle->destroy();
}

using Handles = std::vector<std::shared_ptr<NcclHandle>>;

// Calls `end` for each, by a thread of its own, which is left alone after the limit.
void end_together(Runtime* runtime, const Handles& handles, void (*end)(const Runtime&, NcclHandle*),
                  std::chrono::seconds limit) {
  struct Left {
    Mutex mutex;
    Condition none;
    size_t count GUARDED_BY(mutex);
  };
  const auto left = std::make_shared<Left>();
  {
    const Lock lock(left->mutex);
    left->count = handles.size();
  }
  for (const auto& handle : handles) {
    std::thread([runtime, handle, left, end] {
      end(*runtime, handle.get());
      const Lock lock(left->mutex);
      if (--left->count == 0) left->none.notify_all();
    }).detach();
  }
  Lock lock(left->mutex);
  if (!left->none.wait_for(lock, limit, [&left]() REQUIRES(left->mutex) { return left->count == 0; }))
    runtime->stuck.store(true);
}
}  // namespace

void abort_together(Runtime* runtime, const Handles& handles) {
  end_together(runtime, handles, &abort_one, kAbort);
}

void destroy_together(Runtime* runtime, const Handles& handles) {
  end_together(runtime, handles, &destroy_one, kDestroy);
}

}  // namespace bagua::device
