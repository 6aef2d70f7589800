#include "engine/local/job_state.h"

#include <memory>

#include "net/socket.h"
#include "transport/handshake.h"
#include "transport/libcrypto.h"

namespace bagua {

Status JobState::open() {
  if (Status status = events.open(); !status) return status;
  if (Status status = page.open(); !status) return status;
  segments_ = std::make_unique<SegmentTable>(&counters().segment_bytes);
  budget_ = std::make_unique<Budget>(options.memory_limit, 0, &counters().segment_bytes);
  residuals_ = std::make_unique<ResidualStore>(&counters().residual_bytes);
  if (Status status = residuals_->open(options.memory); !status) return status;
  // Hosts that join learn the address before there are several.
  return options.elastic && !options.listen.empty() ? listen() : Status::ok();
}

Status JobState::listen() {
  if (listener_.valid()) return Status::ok();
  if (Status status = listen_tcp(options.listen, &listener_, &address_); !status) return status;
  const Encryption encryption = options.credentials.encryption;
  if (encryption == Encryption::kNever) return Status::ok();
  if (encryption == Encryption::kBeyondLoopback && listens_on_host(listener_.get())) return Status::ok();
  return KeyExchange().open();
}

void JobState::regroup(const std::vector<int>& local_members, const Tokens& tokens) {
  const std::vector<int> gone = ranks.regroup(local_members, tokens);
  for (const int member : gone) segments_->free_all(member);
  budget_->regroup(local_members.size(), gone);
}

void JobState::close() {
  if (segments_ != nullptr) {
    for (const int member : ranks.regroup({}, {})) segments_->free_all(member);
    segments_->finish_freeing();
  }
  if (residuals_ != nullptr) residuals_->clear();
  listener_.reset();
  page.close();
}

}  // namespace bagua
