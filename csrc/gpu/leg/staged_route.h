// The staged route: device -> pinned shared memory -> the daemon's operation -> pinned shared memory -> device.
//
// For one operation, in the order of enqueuing (see README.md):
//   out_ stream: wait for the caller's stream; copy src to shared memory; host function: submit to the daemon, or
//                queue for a slot (slot_queue.h)
//   in_ stream:  wait for out_; wait until `word_` has reached the operation's sequence number; copy the result to dst;
//                record Operation::end
// A thread of the route waits for the daemon and sets `word_`. It must not call CUDA: the call could wait for the
// context's lock, whose holder may wait for device work that waits for the next value of the word. So submit() and the
// poller find out which results have arrived. Operations of one StagedRoute are released in their order, so operations
// that may overtake each other (collectives, and each direction of each pair) have separate StagedRoutes.
//
// CUDA must know the order of work (in_ waits for out_ by an event), because it may put streams that look independent
// on one hardware queue. Only the word is set by the host.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "gpu/leg/operation.h"
#include "gpu/leg/runtime.h"

namespace bagua::device {

class StagedRoute {
 public:
  // Any thread may call `retire`, when an operation's memory and events are not used any more.
  StagedRoute(Runtime* runtime, std::function<void(Operation*)> retire)
      : runtime_(runtime), retire_(std::move(retire)) {}
  // close() must have been called.
  ~StagedRoute();
  StagedRoute(const StagedRoute&) = delete;
  StagedRoute& operator=(const StagedRoute&) = delete;

  Status open();
  // Retires operations that have ended, then enqueues this one; never waits. `begin` is recorded on the caller's
  // stream. Uses the operation's src, dst and end; the operation must stay until `retire`. Any thread; the device must
  // be current.
  Status submit(Operation* operation, CudaEvent begin);
  // Waits until the daemon has ended all submitted operations, or the leg has failed.
  void wait_empty();
  bool empty();
  // Submits an operation to the daemon. Only SlotQueue calls it, when the input is copied and a slot is free.
  void submit_to_daemon(Operation* operation);
  // Operations must be done, or the leg have failed. Ends the thread, waits for the streams and retires the remaining
  // operations. False: the device did not answer for 10 s, so nothing may be freed.
  bool close();

 private:
  Status place(Operation* operation);
  Status enqueue_out(Operation* operation, CudaEvent begin);
  Status enqueue_in(Operation* operation, CudaEvent copied);
  void release(Operation* operation);
  void release_all();
  void serve();
  bool next(Operation** operation);
  Status await_host(Operation* operation);
  void reap();
  void retire(Operation* operation);
  bool drained();
  Waiting look();

  static void copied_function(void* operation);

  Runtime* const runtime_;
  const std::function<void(Operation*)> retire_;
  uint64_t listener_ = 0, wait_id_ = 0, poll_id_ = 0;  // constant after open()
  CudaStream out_ = nullptr, in_ = nullptr;
  std::atomic<uint32_t>* word_ = nullptr;  // in pinned memory; the GPU reads it
  DriverAddress word_on_device_ = 0;
  Pinned word_memory_;

  Mutex mutex_;                               // guards the next one and the order of enqueuing
  uint32_t sequence_ GUARDED_BY(mutex_) = 0;  // of the newest operation

  Mutex reaping_;  // one thread reaps; held across CUDA calls

  Mutex queue_mutex_;  // taken by host functions
  Condition changed_;
  std::deque<Operation*> queue_ GUARDED_BY(queue_mutex_);  // submitted; thread_ removes them
  bool closing_ GUARDED_BY(queue_mutex_) = false;
  int64_t progress_ns_ GUARDED_BY(queue_mutex_) = 0;         // when the daemon last ended an operation
  std::deque<Operation*> landing_ GUARDED_BY(queue_mutex_);  // results are being copied to dst; reap() removes them

  std::thread thread_;
};

}  // namespace bagua::device
