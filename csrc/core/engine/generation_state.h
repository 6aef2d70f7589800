// State shared by all parts of a generation: its members, its first error, and measurements of its links.
//
// Thread safety: any thread.
#pragma once

#include <atomic>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "engine/job_state.h"
#include "engine/options.h"
#include "transport/stream_count.h"

namespace bagua {

class GenerationState {
 public:
  GenerationState(JobState* job, Membership membership)
      : job_(job), membership_(std::move(membership)), stream_verdicts_(membership_.hosts.size()) {}

  JobState& job() const { return *job_; }
  const Membership& membership() const { return membership_; }

  // Makes the generation fail with this reason; false if it had failed before. The dispatcher then ends what is
  // pending.
  bool fail(const std::string& reason);
  // The same when its owner ends it: no event, and other hosts are told that this one leaves in good order.
  void end(const std::string& reason);
  bool ended() const { return ended_.load(std::memory_order_acquire); }
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  std::string error() const;

  // The verdict on the number of streams to host `host`.
  StreamVerdict* stream_verdict(int host) { return &stream_verdicts_[static_cast<size_t>(host)]; }

  // The order in which rings go round the hosts. The first one stays.
  void set_ring(std::vector<int> order);
  // Empty: not known yet.
  std::vector<int> ring() const;

 private:
  bool set_error(const std::string& reason, bool ended);

  JobState* const job_;
  const Membership membership_;
  std::vector<StreamVerdict> stream_verdicts_;  // by host; never resized

  mutable Mutex mutex_;
  std::string error_ GUARDED_BY(mutex_);
  std::vector<int> ring_ GUARDED_BY(mutex_);
  std::atomic<bool> failed_{false};  // set after error_
  std::atomic<bool> ended_{false};   // the first error is the end; set before failed_
};

}  // namespace bagua
