// The thread that waits for the end: of the engine (the flag in shared memory, or the daemon's death), of this leg, of
// the device, or of a connection of NCCL. It then fails the leg and aborts all communicators of NCCL.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "device/nccl_handle.h"
#include "device/runtime.h"

namespace bagua::device {

class Watcher {
 public:
  explicit Watcher(Runtime* runtime) : runtime_(runtime) {}
  ~Watcher() { stop(); }
  Watcher(const Watcher&) = delete;
  Watcher& operator=(const Watcher&) = delete;

  void start();
  // After it the thread has ended; if the leg has failed, all communicators are aborted. Idempotent.
  void stop();
  // Any thread. One that is added after the failure is aborted by stop().
  void add(std::shared_ptr<NcclHandle> handle);
  void remove(const std::shared_ptr<NcclHandle>& handle);

 private:
  void watch();
  void look();
  void abort_all();
  std::vector<std::shared_ptr<NcclHandle>> handles();

  Runtime* const runtime_;
  uint64_t listener_ = 0;
  std::atomic<bool> stopping_{false};
  CudaEvent probe_ = nullptr;  // never recorded; the thread's
  std::thread thread_;
  std::mutex mutex_;  // guards the next one
  std::vector<std::shared_ptr<NcclHandle>> handles_;
};

}  // namespace bagua::device
