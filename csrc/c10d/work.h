// Operations of torch.distributed, and the queues in which they are carried out.
//
// Works of a queue are submitted to the daemon in their order, and end in their order. The thread that adds a work
// submits as much of it as may fly. The rest is done by one thread at a time, the driver: one that waits for a work of
// the queue, or a helper where somebody has a future of one, or where a work was not submitted to the end. Collectives
// of a group share a queue. Each send and each receive has one of its own, so none waits for another.
//
// A fork of the process has none of the threads that drive: there, operations are an error, and nothing waits.
//
// Callbacks of futures run when the driver has given up its place, so they may communicate and wait.
//
// Thread safety: any thread. Queue::mutex_ guards what is marked so; it is held for no wait and no callback. Nor is it
// held while a work is freed: freeing its tensors may need the interpreter's lock, which a thread that wants mutex_
// has.
#pragma once

#include <c10/core/Stream.h>
#include <c10/util/intrusive_ptr.h>
#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "c10d/host.h"

namespace bagua::dist {

class Queue;

// Returns true if a signal's handler of Python has raised an exception in this thread. Called without the interpreter
// lock.
bool signalled();
// Throws that exception.
[[noreturn]] void raise_signal();

// The steps of a work: requests, one after the other. `held`: tensors whose memory it uses. `outputs`: its result.
// `copies`: pairs (to, from) that are copied at the end.
struct Plan {
  std::vector<TransferRequest> requests;
  // By request: what this rank does between its end and the beginning of the next one. Empty: nothing.
  std::vector<std::function<void()>> afters;
  std::vector<at::Tensor> held, outputs;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;
  std::optional<c10::Stream> stream;  // of the caller, on which results are copied to a device
  int root = -1;                      // of a receive: position of the sender, -1: any
};

// Copies without history, in any thread: what was made in inference mode may be written in that mode alone.
void copy_plainly(const at::Tensor& to, const at::Tensor& from);

class BaguaWork : public ::c10d::Work {
 public:
  BaguaWork(std::shared_ptr<Queue> queue, std::shared_ptr<Host> host, int rank, ::c10d::OpType type, const char* title,
            const std::optional<std::vector<at::Tensor>>& inputs, Plan plan, int64_t timeout_ns, uint64_t sequence);

  bool isCompleted() override;
  bool isSuccess() const override;
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  void abort() override;
  void end_with_group(const std::string& what);  // which became of the group
  int sourceRank() const override;
  std::vector<at::Tensor> result() override { return plan_.outputs; }
  uint64_t getSequencenumber() const override { return sequence_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  friend class Queue;
  using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

  // Submits what can be submitted now; true: all of it.
  bool start();
  Progress step(int64_t deadline_ns, Interrupt interrupt);
  Progress run_alone(int64_t deadline_ns, Interrupt interrupt);
  void after(size_t move);
  bool may_start(size_t move) const;
  void copy_out();
  // Tells those that wait, the profiler and the future. Outside of all locks.
  void complete();

  const std::shared_ptr<Queue> queue_;
  const std::string title_;
  Plan plan_;
  std::vector<std::unique_ptr<Move>> moves_;
  size_t next_ = 0;       // move to be waited for
  size_t submitted_ = 0;  // moves that are submitted
  bool begun_ = false;    // some part of one may be
  const int64_t timeout_ns_, deadline_ns_;
  const uint64_t sequence_;
  int source_;

  // guarded by Queue::mutex_
  bool over_ = false;
  bool told_ = false;  // complete() has taken future_
  std::exception_ptr why_not_;
  FuturePtr future_;
};

using WorkPtr = c10::intrusive_ptr<BaguaWork>;

class Queue : public std::enable_shared_from_this<Queue> {
 public:
  // `keeper` keeps the communicator.
  Queue(std::shared_ptr<Host> host, std::shared_ptr<void> keeper)
      : host_(std::move(host)), keeper_(std::move(keeper)) {}

  // Takes a work. `alone`: the caller is going to wait for it, so it may run at once.
  void add(const WorkPtr& work, bool alone);
  // False: not over by the deadline.
  bool wait(BaguaWork* work, int64_t deadline_ns);
  bool poll(BaguaWork* work);
  BaguaWork::FuturePtr future(BaguaWork* work);
  bool succeeded(const BaguaWork* work);
  // Works that wait and that come end with this reason.
  void fail(const std::string& why);

 private:
  friend class BaguaWork;

  bool in_fork() const { return getpid() != pid_; }
  void refuse_fork(const std::string& title) const;
  void advance();  // submits works in their order, as far as they go
  bool needs_driver() const;
  void ask_helper();
  void help();
  // One step of the first work, by the driver; returns that work if it is over, to be completed after leave().
  // `interruptible`: the driver is a thread of the program, which may have to handle a signal.
  WorkPtr step(Lock* lock, int64_t deadline_ns, bool interruptible);
  Interrupt interrupt(bool interruptible);
  void finish(const WorkPtr& work, std::exception_ptr why_not);
  void leave();
  void run_alone(Lock* lock, const WorkPtr& work);
  void late(const BaguaWork& work);

  const std::shared_ptr<Host> host_;
  const std::shared_ptr<void> keeper_;
  const pid_t pid_ = getpid();
  Mutex mutex_;
  Condition changed_;
  std::deque<WorkPtr> works_;  // not over
  size_t submitted_ = 0;       // so many of them to the end
  size_t futures_ = 0;         // of works that are not over
  bool driven_ = false, helper_asked_ = false;
  std::exception_ptr broken_;
  std::atomic<bool> aborted_{false};
};

}  // namespace bagua::dist
