// The GPU leg of one rank: its communicators and tickets, and their shutdown. __init__.pyi describes the calls.
//
// Thread safety: any thread.
#pragma once

#include <sys/types.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "gpu/leg/communicator.h"
#include "gpu/leg/operation_table.h"
#include "gpu/leg/runtime.h"
#include "gpu/leg/watcher.h"

namespace bagua::device {

struct LegOptions {
  int device = 0;
  std::vector<std::vector<int>> hosts;
  int me = -1;
  std::string route;     // "": choose by measurement
  std::string kernels;   // path
  bool world = true;     // create communicator 0, which waits for all ranks
  bool blocking = true;  // see NcclHandle; BAGUA_NCCL_BLOCKING=0 or 1 says otherwise
};

struct Times {
  int64_t submitted_ns = 0, started_ns = 0, done_ns = 0;
};

class Leg {
 public:
  static Status create(const HostApi& host, LegOptions options, std::unique_ptr<Leg>* out);
  ~Leg();
  Leg(const Leg&) = delete;
  Leg& operator=(const Leg&) = delete;

  Status create_comm(uint32_t comm, std::vector<int> ranks);
  Status destroy_comm(uint32_t comm);
  Status route(uint32_t comm, Route* out, Excluded* excluded);

  // Submits an operation. `descriptor` has no segments or offsets yet; `src` and `dst` take their place.
  Status submit(const Descriptor& descriptor, const void* src, void* dst, CudaStream stream, uint64_t* ticket);
  Status done(uint64_t ticket, bool* done);
  Status wait(uint64_t ticket, CudaStream stream);
  void release(uint64_t ticket);
  // Zeros if the ticket was released.
  Status times(uint64_t ticket, Times* out);
  // The longest wait for other ranks at present.
  Waiting waiting();

  Status transcode(const BaguaTranscode& work, CudaStream stream);

  void abort(const std::string& reason) { runtime_->failure.fail(reason); }
  std::string error() const;
  const Runtime& runtime() const { return *runtime_; }
  void close();

 private:
  Leg(const HostApi& host, LegOptions options);
  Status open_group(uint32_t comm, std::vector<int> ranks);
  Status find(uint64_t ticket, Operation** out);
  Status check_stream(CudaStream stream);
  Status look(Operation* operation, bool* over);
  // True in a forked child: it does not have the leg's threads and must not touch anything.
  bool forked() const;
  Status usable() const;
  void leak(std::unique_ptr<Communicator> group);
  bool quiet(const std::map<uint32_t, std::unique_ptr<Communicator>>& groups) const;
  bool close_groups(std::map<uint32_t, std::unique_ptr<Communicator>>* groups);

  const pid_t pid_;
  const LegOptions options_;
  uint8_t forced_ = 0;  // constant after create()
  std::unique_ptr<Runtime> runtime_;
  std::unique_ptr<OperationTable> table_;
  std::unique_ptr<Watcher> watcher_;

  SharedMutex mutex_;  // guards the next two; locked to read while a group is used
  std::map<uint32_t, std::unique_ptr<Communicator>> groups_ GUARDED_BY(mutex_);
  bool closed_ GUARDED_BY(mutex_) = false;
  bool leaked_ = false;  // used by the thread in close()
};

}  // namespace bagua::device
