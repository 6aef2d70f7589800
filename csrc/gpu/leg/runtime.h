// State shared by all parts of a leg: libraries, the rank's channel, the first failure, events, pinned memory,
// counters.
//
// Thread safety: everything here may be used from any thread. Lock order of the leg, outermost first:
//   Leg::mutex_ -> Communicator::mutex_ -> StagedRoute::mutex_, StagedRoute::reaping_, OperationsInFlight::settling_ ->
//   WaitClock::mutex_ -> OperationsInFlight::mutex_ -> SlotQueue::mutex_ -> Failure::mutex_ ->
//   StagedRoute::queue_mutex_, OperationTable::mutex_ and the other mutexes of this file (each alone).
// CUDA may call a host function on a thread of its own while it holds up whoever enqueues work. So no mutex that a
// host function takes (SlotQueue::mutex_, Failure::mutex_, StagedRoute::queue_mutex_) is held while calling CUDA.
// A call of CUDA may wait for another thread's, and that for work of the device which waits for other ranks. So those
// who end such waits call none: the threads of staged routes, the watcher's thread that aborts, listeners to the
// failure; and so does `waiting`, with WaitClock::mutex_ and OperationsInFlight::mutex_, which tells how long that has
// taken.
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

// The first error, for everybody.
class Failure {
 public:
  // False if there was one before. Listeners have run when it returns.
  bool fail(const std::string& reason);
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  std::string reason() const;
  // Ok, or kUnavailable with the reason.
  Status status() const { return failed() ? Status(Code::kUnavailable, reason()) : Status::ok(); }
  // Is called once, at the failure: at once if it was before. Must not call CUDA.
  uint64_t listen(std::function<void()> listener);
  // After it the listener is not running and will not run.
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
  std::atomic<uint64_t> in_flight{0}, aborts{0}, host_waits{0};
};

// Memory shared with the daemon that the GPU copies from and to.
struct Pinned {
  uint64_t segment = 0, bytes = 0;
  char* data = nullptr;
};

// Streams of one kind may come to share a queue of the hardware, where a stream that waits for other ranks holds up
// what stands behind it. Those of different priorities do not, so each kind has a priority of its own.
enum class Traffic : int { kCollective = 0, kOut = 1, kIn = 2 };

class Runtime {
 public:
  Runtime(const HostApi& host, int device, const std::string& kernels);
  ~Runtime();  // streams must have ended
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  // kUnavailable with what is missing; makes nothing yet.
  Status open();

  Status cuda(CudaError code, const char* what) const;
  Status nccl(NcclResult code, const char* what) const;
  Status host_status(int code, const HostError& error) const;
  // Fails the leg with the engine's reason, if that comes within a second, else with this one: where NCCL sees a broken
  // connection, the daemons know which rank was lost.
  void fail_with_cause(const std::string& reason);

  // Events without timing, used again and again.
  Status take_event(CudaEvent* out);
  void put_event(CudaEvent event);
  Status make_stream(Traffic traffic, CudaStream* out);

  // At least `bytes`; nothing for 0.
  Status take_pinned(uint64_t bytes, Pinned* out);
  void put_pinned(Pinned memory);
  // Memory of the device, by cudaMalloc, or what `keep` has. `total` counts it.
  Status allocate(uint64_t bytes, void** out, std::atomic<uint64_t>* total);
  // Takes memory back for later. cudaFree waits for all work of the device, which may wait for other ranks.
  void keep(void* data, uint64_t bytes);

  // Whether streams can wait for a word in pinned memory, which the staged route needs: empty, or why not.
  const std::string& no_wait_value() const { return no_wait_value_; }

  const HostApi host;
  const int device;
  // Of the device; nullptr where there is no driver's library.
  CudaContext context() const { return context_; }
  Libraries libraries;  // constant after open()
  Failure failure;
  WaitClock wait_clock;
  Poller poller;
  SlotQueue slots;
  LegCounters counters;
  std::atomic<bool> stuck{false};  // a library did not come back: what belongs to it stays until the process ends

 private:
  Status retain();
  void give_back();
  Status try_wait_value();
  void load_kernels();

  int handle_ = 0;  // the driver's, of the device; constant after open(), as is the next one
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

// The device of this thread is the leg's as long as it lives, and what it asks of CUDA spoils no capture of a graph
// that goes on elsewhere. By the driver's stack of contexts: cudaSetDevice() would make a context on the device that it
// goes back to, hundreds of MB on GPU 0 for every rank of the host.
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
