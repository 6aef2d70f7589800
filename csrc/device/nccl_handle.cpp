#include "device/nccl_handle.h"

#include <chrono>
#include <thread>

namespace bagua::device {

// ncclCommInitRank() waits for all members, and can't be given a deadline: it runs on a thread of its own, which may
// outlive the handle.
struct NcclHandle::Birth {
  std::mutex mutex;  // guards what follows
  std::condition_variable changed;
  bool over = false, unwanted = false;
  Status status;
  NcclComm comm = nullptr;
};

NcclHandle::~NcclHandle() = default;

Status NcclHandle::create(const NcclId& id) {
  auto birth = std::make_shared<Birth>();
  const uint64_t listener = runtime_->failure.listen([birth] {
    std::lock_guard<std::mutex> lock(birth->mutex);
    birth->unwanted = true;
    birth->changed.notify_all();
  });
  const auto work = [birth, id, nccl = runtime_->libraries.nccl, cuda = runtime_->libraries.cuda,
                     device = runtime_->device, ranks = ranks_, rank = rank_] {
    cuda.set_device(device);
    int mode = kCaptureRelaxed;
    cuda.capture_mode(&mode);
    NcclComm comm = nullptr;
    const NcclResult code = nccl.init_rank(&comm, ranks, id, rank);
    std::lock_guard<std::mutex> lock(birth->mutex);
    birth->over = true;
    if (code != kNcclOk) {
      birth->status = {Code::kUnavailable, std::string("NCCL: making a communicator failed: ") + nccl.error_text(code) +
                                               " (NCCL_DEBUG=INFO has more)"};
    } else if (birth->unwanted) {
      nccl.abort(comm);
    } else {
      birth->comm = comm;
    }
    birth->changed.notify_all();
  };
  std::thread(work).detach();
  Status status;
  {
    std::unique_lock<std::mutex> lock(birth->mutex);
    birth->changed.wait(lock, [&] { return birth->over || birth->unwanted; });
    status = birth->over ? birth->status : Status(Code::kUnavailable, "the job failed meanwhile");
    std::lock_guard<std::mutex> own(mutex_);
    comm_ = birth->comm;
  }
  runtime_->failure.forget(listener);
  if (runtime_->failure.failed()) return runtime_->failure.status();
  return status;
}

NcclComm NcclHandle::begin() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (comm_ == nullptr || runtime_->failure.failed()) return nullptr;
  ++users_;
  return comm_;
}

void NcclHandle::end() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (--users_ == 0) idle_.notify_all();
}

Status NcclHandle::async_error() {
  const NcclComm comm = begin();
  if (comm == nullptr) return Status::ok();
  NcclResult seen = kNcclOk;
  const NcclResult code = runtime_->libraries.nccl.async_error(comm, &seen);
  end();
  if (code != kNcclOk) return runtime_->nccl(code, "asking for errors");
  return runtime_->nccl(seen, "communication");
}

void NcclHandle::abort() {
  NcclComm comm = nullptr;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    idle_.wait_for(lock, std::chrono::seconds(1), [this] { return users_ == 0; });
    std::swap(comm, comm_);
  }
  if (comm == nullptr) return;
  runtime_->counters.aborts.fetch_add(1);
  runtime_->libraries.nccl.abort(comm);
}

void NcclHandle::destroy() {
  NcclComm comm = nullptr;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    idle_.wait(lock, [this] { return users_ == 0; });
    std::swap(comm, comm_);
  }
  if (comm != nullptr) runtime_->libraries.nccl.destroy(comm);
}

}  // namespace bagua::device
