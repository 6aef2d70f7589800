// Detects engine failure and aborts NCCL.
//
// One thread waits for the failure of the engine (the flag in shared memory, or the daemon's death) or of the leg,
// fails the leg, and aborts all communicators of NCCL. It calls no CUDA before that: a call may wait for one of another
// thread, which may wait for a kernel of NCCL that only the abort ends. The other thread looks every 100 ms for errors
// of the device and of NCCL's connections, and polls (Runtime::poller).
#pragma once

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "gpu/leg/nccl_handle.h"
#include "gpu/leg/runtime.h"

namespace bagua::device {

class Watcher {
 public:
  explicit Watcher(Runtime* runtime) : runtime_(runtime) {}
  ~Watcher() { static_cast<void>(stop()); }
  Watcher(const Watcher&) = delete;
  Watcher& operator=(const Watcher&) = delete;

  void start();
  // After it the threads have ended; if the leg has failed, all communicators are aborted. Idempotent. False: the one
  // that calls CUDA did not come back for 10 s, and still uses this and the runtime; Runtime::stuck is set.
  bool stop();
  // Any thread. One that is added after the failure is aborted by stop().
  void add(std::shared_ptr<NcclHandle> handle);
  void remove(const std::shared_ptr<NcclHandle>& handle);

 private:
  void watch();
  void look_periodically();
  Status open_probe();
  void look();
  void abort_all();
  std::vector<std::shared_ptr<NcclHandle>> handles();

  Runtime* const runtime_;
  uint64_t listener_ = 0, wait_id_ = 0;
  std::atomic<bool> stopping_{false};
  CudaEvent probe_ = nullptr;  // recorded once; the looking thread's
  std::thread thread_, looking_;
  Mutex mutex_;
  Condition changed_;
  bool looked_ GUARDED_BY(mutex_) = false;  // the looking thread is over
  std::vector<std::shared_ptr<NcclHandle>> handles_ GUARDED_BY(mutex_);
};

}  // namespace bagua::device
