// Detects engine failure and aborts NCCL.
//
// One thread waits for a failure of the engine (the flag in shared memory, or the daemon's death) or of the leg, fails
// the leg, and aborts all communicators of NCCL. It calls no CUDA before the abort: the call could wait for another
// thread, which may wait for a kernel of NCCL that only the abort ends. The other thread checks the device and NCCL's
// connections for errors every 100 ms, and runs Runtime::poller.
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
  // Ends the threads. If the leg has failed, all communicators are aborted when it returns. Idempotent. False: the
  // thread that calls CUDA has not returned for 10 s and still uses this object and the runtime; Runtime::stuck is set.
  bool stop();
  // Any thread. stop() aborts handles that were added after the failure.
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
  CudaEvent probe_ = nullptr;  // recorded once; used by the checking thread only
  std::thread thread_, looking_;
  Mutex mutex_;
  Condition changed_;
  bool looked_ GUARDED_BY(mutex_) = false;  // the checking thread has ended
  std::vector<std::shared_ptr<NcclHandle>> handles_ GUARDED_BY(mutex_);
};

}  // namespace bagua::device
