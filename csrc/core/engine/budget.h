// Refuses memory that this host does not have, with the figures, before ranks use it. Otherwise they would meet a
// SIGBUS or the OOM killer later.
//
// Thread safety: the channel server's thread only.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>

#include "base/status.h"
#include "channel/headroom.h"

namespace bagua {

class Budget {
 public:
  // `limit`: of this engine's tensor memory in bytes, 0: none but the host's. `in_use`: tensor memory handed out.
  Budget(uint64_t limit, size_t local_ranks, const std::atomic<uint64_t>* in_use,
         std::function<Headroom()> host = &memory_headroom)
      : limit_(limit), local_ranks_(local_ranks), in_use_(in_use), host_(std::move(host)) {}

  // `rank` is going to ask for `bytes` in all. Ranks that have not said what they need are taken to need the same.
  // kResource with what the job needs on this host and what is left.
  Status require(int rank, uint64_t bytes);
  // `rank` asks for `bytes` now.
  Status allow(int rank, uint64_t bytes);
  // `rank` has got them.
  void took(int rank, uint64_t bytes);

 private:
  Headroom room() const;

  const uint64_t limit_;
  const size_t local_ranks_;
  const std::atomic<uint64_t>* const in_use_;
  const std::function<Headroom()> host_;
  std::map<int, uint64_t> announced_;  // by rank: what it said it needs and has not got yet
  uint64_t job_bytes_ = 0;             // what the last require() found the job to need here
};

}  // namespace bagua
