// One communicator of NCCL, which different threads can use, abort and destroy.
//
// One thread at a time calls NCCL. The communicator is non-blocking: while NCCL waits for other ranks it answers "in
// progress" and is polled, so every wait ends when the leg fails. NCCL starts a thread for each group of such a
// communicator, which costs the caller a quarter of a millisecond. divide() makes a child that blocks: then the
// caller's thread enqueues, and where it waits for other ranks in NCCL, only abort() ends that. The parent stays,
// unused, until both are given back: NCCL takes up to half a second to end a communicator, since a thread of its looks
// every 500 ms.
//
// Thread safety: one thread calls create(), divide(), ready() and take_child(); any thread calls the rest. No lock is
// held while calling NCCL.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "base/mutex.h"
#include "gpu/leg/runtime.h"

namespace bagua::device {

class NcclHandle {
 public:
  NcclHandle(Runtime* runtime, int ranks, int rank) : runtime_(runtime), ranks_(ranks), rank_(rank) {}
  ~NcclHandle() = default;  // call destroy() or abort() first
  NcclHandle(const NcclHandle&) = delete;
  NcclHandle& operator=(const NcclHandle&) = delete;

  // Begins to join the other members. Call abort() even after an error.
  Status create(const NcclId& id);
  // Begins to make a child of a communicator that is ready; all members do. Call abort() even after an error.
  Status divide();
  // Sets `over` when all members have done what was begun, or an error has occurred.
  Status ready(bool* over);
  // The child, in a handle of its own. Call it when all members are ready().
  std::shared_ptr<NcclHandle> take_child();

  // Runs `calls(comm)`, which returns its first error, as one group of NCCL. Returns when the group is enqueued. It
  // waits for other ranks if NCCL has to make connections.
  template <class Calls>
  Status launch(const char* what, Calls calls) {
    const NcclComm comm = begin();
    if (comm == nullptr) return aborted();
    const Nccl& nccl = runtime_->libraries.nccl;
    std::optional<WaitClock::Scope> waiting;
    if (blocks_) {
      waiting.emplace(&runtime_->wait_clock, connects(what));
      runtime_->counters.blocking_groups.fetch_add(1, std::memory_order_relaxed);
    }
    NcclResult code = nccl.group_start();
    if (code == kNcclOk) {
      code = calls(comm);
      const NcclResult ended = nccl.group_end();
      if (goes_on(code)) code = ended;
    }
    const Status status = settle(comm, code, what);
    end();
    return status;
  }

  // Returns errors that NCCL found after a call had returned, such as a broken connection. Ok while another thread
  // calls.
  Status async_error();
  // Releases threads and device work that hang in NCCL. Gives callers some time to return by themselves first.
  void abort();
  // Orderly end: no operation may be pending. Aborts if NCCL has not ended it in 10 s; where the communicator blocks,
  // the call takes as long as NCCL does.
  void destroy();

  int ranks() const { return ranks_; }
  int rank() const { return rank_; }

 private:
  // A thread must call NCCL between begin() and end(), one thread at a time. nullptr: the communicator was aborted.
  NcclComm begin();
  void end();
  // With the reason why the leg has failed, if it has.
  Status aborted() const;
  Status settle(NcclComm comm, NcclResult code, const char* what);
  // For people, while a call waits.
  static std::string connects(const char* what);

  Runtime* const runtime_;
  const int ranks_, rank_;

  NcclComm child_ = nullptr;  // NCCL writes it while divide() is under way
  bool divided_ = false;      // divide() has begun
  bool blocks_ = false;       // constant: this is a child

  Mutex mutex_;
  Condition idle_;
  NcclComm comm_ GUARDED_BY(mutex_) = nullptr;
  bool in_use_ GUARDED_BY(mutex_) = false;
};

// Aborts all communicators at once: ncclCommAbort() waits for the device, and so for kernels of communicators that are
// not aborted yet. If it does not return within 10 s it sets Runtime::stuck, because its threads still use the handles
// and the runtime.
void abort_together(Runtime* runtime, const std::vector<std::shared_ptr<NcclHandle>>& handles);
// Destroys all at once; as above if that takes longer than 12 s.
void destroy_together(Runtime* runtime, const std::vector<std::shared_ptr<NcclHandle>>& handles);

}  // namespace bagua::device
