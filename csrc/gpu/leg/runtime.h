// State shared by all parts of a leg, which is the side of a GPU in a rank's process: libraries, the rank's channel,
// the first failure, events, pinned memory, counters.
//
// Thread safety: any thread may use everything here. Lock order of the leg, outermost first:
//   Leg::mutex_ -> Communicator::mutex_ -> StagedRoute::mutex_, StagedRoute::reaping_, OperationsInFlight::settling_ ->
//   WaitClock::mutex_ -> OperationsInFlight::mutex_ -> SlotQueue::mutex_ -> Failure::mutex_ ->
//   StagedRoute::queue_mutex_, OperationTable::mutex_ and the other mutexes of this file (each alone).
// CUDA may block a thread that enqueues work until a host function has run on a thread of CUDA. So a mutex that host
// functions lock (SlotQueue::mutex_, Failure::mutex_, StagedRoute::queue_mutex_) must not be held while calling CUDA.
// A CUDA call may wait for a call of another thread, which may wait for device work that waits for other ranks. So the
// code that ends such waits calls no CUDA: the threads of staged routes, the watcher's aborting thread, and listeners
// of the failure. `waiting`, which measures these waits with WaitClock::mutex_ and OperationsInFlight::mutex_, calls no
// CUDA either.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "base/status.h"
#include "channel/host_api.h"
#include "gpu/leg/api/libraries.h"
#include "gpu/leg/poller.h"
#include "gpu/leg/slot_queue.h"
#include "gpu/leg/wait_clock.h"

namespace bagua::device {

// Keeps the first error of the leg and tells listeners.
class Failure {
 public:
  // Returns false if the leg had failed before. When it returns, the listeners have run.
  bool fail(const std::string& reason);
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  // For waits of HostApi, whose `context` is a Failure.
  static bool interrupts(void* failure) { return static_cast<const Failure*>(failure)->failed(); }
  std::string reason() const;
  // Ok, or kUnavailable with the reason of the failure.
  Status status() const { return failed() ? Status(Code::kUnavailable, reason()) : Status::ok(); }
  // Adds a listener, which is called once: at the failure, or at once if the leg has failed already. The
  // listener must not call CUDA.
  uint64_t listen(std::function<void()> listener);
  // When it returns, the listener is not running and will not run again.
  void forget(uint64_t listener);

 private:
  std::atomic<bool> failed_{false};
  mutable Mutex mutex_;  // held while listeners run
  std::string reason_ GUARDED_BY(mutex_);
  uint64_t next_ GUARDED_BY(mutex_) = 1;
  std::vector<std::pair<uint64_t, std::function<void()>>> listeners_ GUARDED_BY(mutex_);
};

struct LegCounters {
  std::atomic<uint64_t> ops{0}, ops_staged{0}, ops_flat{0}, ops_hierarchical{0}, bytes{0};
  std::atomic<uint64_t> pinned_bytes{0}, scratch_bytes{0}, residual_bytes{0};
  std::atomic<uint64_t> in_flight{0}, aborts{0}, host_waits{0}, blocking_groups{0};
};

// Pinned memory shared with the daemon; the GPU copies from it and to it.
struct Pinned {
  uint64_t segment = 0, bytes = 0;
  char* data = nullptr;
};

// Kinds of streams, each with its own priority. Streams of the same priority may share a hardware queue, in which a
// stream that waits for other ranks blocks the work behind it.
enum class Traffic : int { kCollective = 0, kOut = 1, kIn = 2 };

class Runtime {
 public:
  Runtime(const HostApi& host, int device, const std::string& kernels);
  ~Runtime();  // all streams must have ended
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  // Prepares the device. kUnavailable: something is missing, and the text names it.
  Status open();

  Status cuda(CudaError code, const char* what) const;
  Status nccl(NcclResult code, const char* what) const;
  Status host_status(int code, const HostError& error) const;
  // Fails the leg with the engine's reason if that comes within a second, else with `reason`. If NCCL sees a broken
  // connection, the daemons know which rank was lost.
  void fail_with_cause(const std::string& reason);

  // Takes an event without timing from a pool.
  Status take_event(CudaEvent* out);
  void put_event(CudaEvent event);
  Status make_stream(Traffic traffic, CudaStream* out);

  // Takes at least `bytes` of pinned memory; none for 0.
  Status take_pinned(uint64_t bytes, Pinned* out);
  void put_pinned(Pinned memory);
  // Takes device memory that `keep` has stored, or allocates it by cudaMalloc and adds it to `total`.
  Status allocate(uint64_t bytes, void** out, std::atomic<uint64_t>* total);
  // Stores memory for reuse instead of freeing it: cudaFree waits for all work of the device, which may wait for
  // others.
  void keep(void* data, uint64_t bytes);

  // Why streams can't wait for a word in pinned memory, which the staged route needs; empty if they can.
  const std::string& no_wait_value() const { return no_wait_value_; }

  const HostApi host;
  const int device;
  // The context of the device; nullptr without the driver's library.
  CudaContext context() const { return context_; }
  Libraries libraries;       // constant after open()
  bool nccl_blocks = false;  // constant after open(): communicators of NCCL are to block
  Failure failure;
  WaitClock wait_clock;
  Poller poller;
  SlotQueue slots;
  LegCounters counters;
  std::atomic<bool> stuck{false};  // a library call has not returned: its memory stays until the process ends

 private:
  Status retain();
  void give_back();
  Status try_wait_value();
  void load_kernels();

  int handle_ = 0;  // the driver's handle of the device; constant after open(), as is the next one
  CudaContext context_ = nullptr;
  int least_ = 0, greatest_ = 0;  // priorities of streams; constant after open(), as is the next one
  std::string no_wait_value_;

  struct Spare {
    void* data;
    uint64_t bytes;
  };

  Mutex mutex_;
  std::vector<CudaEvent> events_ GUARDED_BY(mutex_);
  std::vector<Pinned> idle_ GUARDED_BY(mutex_);
  std::vector<Spare> spares_ GUARDED_BY(mutex_);
  Mutex made_mutex_;
  std::vector<Pinned> made_ GUARDED_BY(made_mutex_);
};

// RAII: makes the leg's device the current one of this thread, and lets CUDA calls run while another thread captures a
// graph. It uses the driver's stack of contexts: restoring by cudaSetDevice() would create a context on the former
// device, which takes hundreds of MB on GPU 0 for each rank of the host.
class OnDevice {
 public:
  explicit OnDevice(const Runtime& runtime);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  const Status& status() const { return status_; }

 private:
  const Runtime& runtime_;
  bool pushed_ = false;
  int before_ = -1;
  int mode_ = kCaptureRelaxed;
  Status status_;
};

}  // namespace bagua::device
