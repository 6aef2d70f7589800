#include "device/watcher.h"

#include <algorithm>

#include "base/clock.h"

namespace bagua::device {

namespace {
constexpr int64_t kLookNs = 100 * kNsPerMs;  // NCCL tells of a broken connection only to whoever asks
}

void Watcher::start() {
  const HostApi& host = runtime_->host;
  listener_ = runtime_->failure.listen([&host] { host.nudge(host.client); });
  thread_ = std::thread([this] { watch(); });
}

void Watcher::stop() {
  if (thread_.joinable()) {
    stopping_.store(true);
    runtime_->host.nudge(runtime_->host.client);
    thread_.join();
  }
  if (listener_ != 0) runtime_->failure.forget(listener_);
  listener_ = 0;
  if (runtime_->failure.failed()) abort_all();
}

void Watcher::watch() {
  const HostApi& host = runtime_->host;
  Status status = runtime_->use_device();
  if (status) status = runtime_->take_event(&probe_);
  if (!status) runtime_->failure.fail(status.message());
  while (!stopping_.load() && !runtime_->failure.failed()) {
    HostError error;
    if (host.wait_failure(host.client, now_ns() + kLookNs, &error) == kHostFailed) {
      runtime_->failure.fail(error.text);
    } else {
      look();
    }
  }
  runtime_->put_event(probe_);
  if (runtime_->failure.failed()) abort_all();
}

void Watcher::look() {
  static_cast<void>(runtime_->waits.longest());  // notes what NCCL has begun
  // An error of the device that nothing gets over (a wrong address in some kernel) is the answer to every question.
  const CudaError code = probe_ == nullptr ? kCudaOk : runtime_->libraries.cuda.event_query(probe_);
  if (Status status = runtime_->cuda(code, "work"); !status) {
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
  std::lock_guard<std::mutex> lock(mutex_);
  return handles_;
}

void Watcher::add(std::shared_ptr<NcclHandle> handle) {
  std::lock_guard<std::mutex> lock(mutex_);
  handles_.push_back(std::move(handle));
}

void Watcher::remove(const std::shared_ptr<NcclHandle>& handle) {
  std::lock_guard<std::mutex> lock(mutex_);
  handles_.erase(std::remove(handles_.begin(), handles_.end(), handle), handles_.end());
}

}  // namespace bagua::device
