// One communicator of NCCL, and who may use it when: it is used, aborted and destroyed by different threads, and NCCL
// frees it in the last two.
//
// Thread safety: all but create() any thread. No lock is held while calling NCCL.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>

#include "device/runtime.h"

namespace bagua::device {

class NcclHandle {
 public:
  NcclHandle(Runtime* runtime, int ranks, int rank) : runtime_(runtime), ranks_(ranks), rank_(rank) {}
  ~NcclHandle();  // after destroy() or abort()
  NcclHandle(const NcclHandle&) = delete;
  NcclHandle& operator=(const NcclHandle&) = delete;

  // Waits for the other members. Ends with the leg's failure at the latest; then a thread of NCCL may be left behind
  // until NCCL itself notices that nobody comes.
  Status create(const NcclId& id);

  // Calls of NCCL go between begin() and end(). nullptr: it was aborted.
  NcclComm begin();
  void end();

  // Errors that NCCL met after a call had returned: a broken connection.
  Status async_error();
  // Frees whoever hangs in a call or on the device. First gives callers a second to get out of NCCL by themselves.
  void abort();
  // In good order: nothing is pending on it.
  void destroy();

  int ranks() const { return ranks_; }
  int rank() const { return rank_; }

 private:
  struct Birth;

  Runtime* const runtime_;
  const int ranks_, rank_;

  std::mutex mutex_;  // guards what follows
  std::condition_variable idle_;
  NcclComm comm_ = nullptr;
  int users_ = 0;
};

}  // namespace bagua::device
