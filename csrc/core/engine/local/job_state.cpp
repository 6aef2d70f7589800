#include "engine/local/job_state.h"

#include <memory>

namespace bagua {

Status JobState::open() {
  if (Status status = events_.open(); !status) return status;
  if (Status status = page_.open(); !status) return status;
  segments_ = std::make_unique<SegmentTable>(&counters().segment_bytes);
  budget_ = std::make_unique<Budget>(options_.memory_limit, 0, &counters().segment_bytes);
  residuals_ = std::make_unique<ResidualStore>(&counters().residual_bytes);
  if (Status status = residuals_->open(options_.memory); !status) return status;
  // Hosts that join learn the address before there are several.
  return options_.elastic && !options_.listen.empty() ? listener_.open(options_) : Status::ok();
}

void JobState::regroup(const std::vector<int>& local_members, const Tokens& tokens) {
  const std::vector<int> gone = ranks_.regroup(local_members, tokens);
  for (const int member : gone) segments_->free_all(member);
  budget_->regroup(local_members.size(), gone);
}

void JobState::close() {
  if (segments_ != nullptr) {
    for (const int member : ranks_.regroup({}, {})) segments_->free_all(member);
    segments_->finish_freeing();
  }
  if (residuals_ != nullptr) residuals_->clear();
  listener_.close();
  page_.close();
}

}  // namespace bagua
