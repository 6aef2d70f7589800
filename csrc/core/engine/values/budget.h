// Refuses memory that this host does not have, with the figures, before ranks use it. Otherwise they would meet a
// SIGBUS or the OOM killer later.
//
// Thread safety: any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "base/mutex.h"
#include "base/status.h"
#include "channel/headroom.h"

namespace bagua {

class Budget {
 public:
  // `limit`: of this engine's tensor memory in bytes, 0: none but the host's. `in_use`: tensor memory handed out.
  Budget(uint64_t limit, size_t local_ranks, const std::atomic<uint64_t>* in_use,
         std::function<Headroom()> host = &memory_headroom)
      : limit_(limit), in_use_(in_use), host_(std::move(host)), local_ranks_(local_ranks) {}

  // Sets the number of members on this host; members in `gone` have left it.
  void regroup(size_t local_ranks, const std::vector<int>& gone);
  // `member` is going to ask for `bytes` in all. Those that have not said what they need are taken to need the same.
  // kResource with what the job needs on this host and what is left.
  Status require(int member, uint64_t bytes);
  // `member` asks for `bytes` now.
  Status allow(int member, uint64_t bytes);
  // `member` has got them.
  void took(int member, uint64_t bytes);

 private:
  Headroom room() const;

  const uint64_t limit_;
  const std::atomic<uint64_t>* const in_use_;
  const std::function<Headroom()> host_;
  Mutex mutex_;
  size_t local_ranks_ GUARDED_BY(mutex_);
  std::map<int, uint64_t> announced_ GUARDED_BY(mutex_);  // by member: what it said it needs and has not got yet
  uint64_t job_bytes_ GUARDED_BY(mutex_) = 0;             // what the last require() found the job to need here
};

}  // namespace bagua
