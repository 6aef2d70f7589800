// One communicator of NCCL, used, aborted and destroyed by different threads.
//
// One thread at a time calls NCCL. The communicator does not block: NCCL answers "in progress" where it waits for other
// ranks and is asked again, so that every wait ends with the leg's failure at the latest.
//
// Thread safety: create() and created() one thread; all else any thread. No lock is held while calling NCCL.
#pragma once

#include <memory>
#include <vector>

#include "base/mutex.h"
#include "gpu/leg/runtime.h"

namespace bagua::device {

class NcclHandle {
 public:
  NcclHandle(Runtime* runtime, int ranks, int rank) : runtime_(runtime), ranks_(ranks), rank_(rank) {}
  NcclHandle(const NcclHandle&) = delete;  // destroy() or abort() come before the end
  NcclHandle& operator=(const NcclHandle&) = delete;

  // Begins to join the other members. After an error abort() is still needed.
  Status create(const NcclId& id);
  // Whether all have joined, or an error; `over` false: not yet.
  Status created(bool* over);

  // One group of NCCL: `calls(comm)` returns the first result that is an error. Returns when all of it is enqueued,
  // which waits for other ranks where connections have to be made.
  template <class Calls>
  Status launch(const char* what, Calls calls) {
    const NcclComm comm = begin();
    if (comm == nullptr) return {Code::kAborted, "the communicator was aborted"};
    const Nccl& nccl = runtime_->libraries.nccl;
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

  // Errors that NCCL met after a call had returned: a broken connection. Ok while somebody else is calling.
  Status async_error();
  // Frees whoever hangs in a call or on the device. First gives callers a second to get out of NCCL by themselves.
  void abort();
  // In good order: nothing is pending on it. Waits for the other members, 10 s at most: then it is aborted.
  void destroy();

  int ranks() const { return ranks_; }
  int rank() const { return rank_; }

 private:
  // Calls of NCCL go between begin() and end(): one thread at a time. nullptr: it was aborted.
  NcclComm begin();
  void end();
  Status settle(NcclComm comm, NcclResult code, const char* what);
  NcclResult state_of(NcclComm comm);

  Runtime* const runtime_;
  const int ranks_, rank_;

  Mutex mutex_;
  Condition idle_;
  NcclComm comm_ GUARDED_BY(mutex_) = nullptr;
  bool in_use_ GUARDED_BY(mutex_) = false;
};

// Aborts all at once: ncclCommAbort() waits for the device, and so for the kernels of communicators that have not been
// aborted yet. If it is not back within 10 s, Runtime::stuck is set: its threads still use the handles and the runtime.
void abort_together(Runtime* runtime, const std::vector<std::shared_ptr<NcclHandle>>& handles);

}  // namespace bagua::device
