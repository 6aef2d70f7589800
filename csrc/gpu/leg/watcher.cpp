#include "gpu/leg/watcher.h"

#include <algorithm>
#include <chrono>

#include "base/clock.h"

namespace bagua::device {

namespace {
constexpr int64_t kLookNs = 100 * kNsPerMs;  // errors of NCCL's connections must be polled
constexpr std::chrono::seconds kLastLook{10};
}  // namespace

void Watcher::start() {
  const HostApi& host = runtime_->host;
  listener_ = runtime_->failure.listen([&host] { host.nudge(host.client); });
  // A poll that hangs counts as a wait: it may wait for a kernel of NCCL that waits for other ranks.
  wait_id_ = runtime_->wait_clock.add([this] {
    return Waiting{runtime_->poller.hanging_since(), "CUDA does not answer: another call holds the context's lock."};
  });
  thread_ = std::thread([this] { watch(); });
  looking_ = std::thread([this] { look_periodically(); });
}

bool Watcher::stop() {
  stopping_.store(true);
  if (thread_.joinable()) {
    runtime_->host.nudge(runtime_->host.client);
    thread_.join();
  }
  if (listener_ != 0) runtime_->failure.forget(listener_);
  if (wait_id_ != 0) runtime_->wait_clock.remove(wait_id_);
  listener_ = wait_id_ = 0;
  if (runtime_->failure.failed()) abort_all();
  if (!looking_.joinable()) return !runtime_->stuck.load();
  Lock lock(mutex_);
  changed_.notify_all();
  const bool over = changed_.wait_for(lock, kLastLook, [this]() REQUIRES(mutex_) { return looked_; });
  lock.unlock();
  if (over) {
    looking_.join();
  } else {
    looking_.detach();
    runtime_->stuck.store(true);
  }
  return over;
}

void Watcher::watch() {
  const HostApi& host = runtime_->host;
  while (!stopping_.load() && !runtime_->failure.failed()) {
    HostError error;
    if (host.wait_failure(host.client, now_ns() + kLookNs, &error) == kHostFailed) runtime_->failure.fail(error.text);
  }
  if (runtime_->failure.failed()) abort_all();
}

void Watcher::look_periodically() {
  {
    OnDevice here(*runtime_);
    Status status = here.status();
    if (status) status = open_probe();
    if (!status) runtime_->failure.fail(status.message());
    Lock lock(mutex_);
    while (!stopping_.load() && !runtime_->failure.failed()) {
      lock.unlock();
      look();
      lock.lock();
      changed_.wait_for(lock, std::chrono::nanoseconds(kLookNs), [this] { return stopping_.load(); });
    }
    lock.unlock();
    runtime_->put_event(probe_);
  }
  const Lock lock(mutex_);
  looked_ = true;
  changed_.notify_all();
}

// Records an event to query: an event that was never recorded may report success even if the device has failed.
Status Watcher::open_probe() {
  const CudaRuntime& cuda = runtime_->libraries.cuda;
  CudaStream stream = nullptr;
  Status status = runtime_->take_event(&probe_);
  if (status) status = runtime_->make_stream(Traffic::kIn, &stream);
  if (status) status = runtime_->cuda(cuda.event_record(probe_, stream), "recording an event");
  if (stream != nullptr) cuda.stream_destroy(stream);
  return status;
}

void Watcher::look() {
  runtime_->poller.poll();
  // After a fatal error of the device (such as an invalid address in a kernel) every call returns this error.
  const CudaError code = probe_ == nullptr ? kCudaOk : runtime_->libraries.cuda.event_query(probe_);
  if (Status status = runtime_->cuda(code == kCudaNotReady ? kCudaOk : code, "work"); !status) {
    runtime_->failure.fail(status.message());
    return;
  }
  for (const auto& handle : handles()) {
    if (Status status = handle->async_error(); !status) {
      runtime_->fail_with_cause(status.message());
      return;
    }
  }
}

void Watcher::abort_all() {
  abort_together(runtime_, handles());
}

std::vector<std::shared_ptr<NcclHandle>> Watcher::handles() {
  const Lock lock(mutex_);
  return handles_;
}

void Watcher::add(std::shared_ptr<NcclHandle> handle) {
  const Lock lock(mutex_);
  handles_.push_back(std::move(handle));
}

void Watcher::remove(const std::shared_ptr<NcclHandle>& handle) {
  const Lock lock(mutex_);
  handles_.erase(std::remove(handles_.begin(), handles_.end(), handle), handles_.end());
}

}  // namespace bagua::device
