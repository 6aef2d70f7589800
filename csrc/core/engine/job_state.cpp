#include "engine/job_state.h"

#include <algorithm>
#include <memory>
#include <utility>

namespace bagua {

JobState::JobState(EngineOptions options, const std::vector<int>& local_ranks)
    : options_(std::move(options)), local_ranks_(local_ranks), ranks_(local_ranks) {}

Status JobState::open() {
  if (Status status = events_.open(); !status) return status;
  if (Status status = page_.open(local_ranks_); !status) return status;
  segments_ = std::make_unique<SegmentTable>(&counters().segment_bytes);
  budget_ = std::make_unique<Budget>(options_.memory_limit, local_ranks_.size(), &counters().segment_bytes);
  residuals_ = std::make_unique<ResidualStore>(&counters().residual_bytes);
  return Status::ok();
}

void JobState::close() {
  for (const int rank : local_ranks_) {
    if (segments_ != nullptr) segments_->free_all(rank);
  }
  if (residuals_ != nullptr) residuals_->clear();
  ranks_.close();
  listener_.close();
  page_.close();
}

void JobState::await_no_more(int rank) {
  const auto found = std::find(local_ranks_.begin(), local_ranks_.end(), rank);
  if (found != local_ranks_.end()) page_.await_no_more(static_cast<size_t>(found - local_ranks_.begin()));
}

}  // namespace bagua
