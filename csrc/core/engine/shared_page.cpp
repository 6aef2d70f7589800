#include "engine/shared_page.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "channel/futex.h"

namespace bagua {

Status SharedPage::open(const std::vector<int>& local_ranks) {
  if (Status status = Mapping::create(sizeof(JobPage), &descriptor_, &memory_); !status) return status;
  JobPage* page = new (memory_->data()) JobPage();
  page->version = kLayoutVersion;
  page->local_ranks = static_cast<uint32_t>(local_ranks.size());
  for (size_t i = 0; i < local_ranks.size() && i < kArrivalRanks; ++i) {
    page->ranks[i] = static_cast<uint32_t>(local_ranks[i]);
  }
  return Status::ok();
}

void SharedPage::begin(const Membership& membership) {
  JobPage* page = get();
  page->host_index = static_cast<uint32_t>(membership.host_index);
  page->generation = membership.generation;
  page->world_size = static_cast<uint32_t>(membership.world_size());
  page->error_state.store(kNoError, std::memory_order_release);
}

void SharedPage::show_error(const std::string& reason) {
  JobPage* page = get();
  page->error_state.store(kErrorWriting, std::memory_order_relaxed);
  const size_t length = std::min(reason.size(), kErrorBytes);
  memcpy(page->error, reason.data(), length);
  page->error_length = static_cast<uint32_t>(length);
  page->error_state.store(kErrorSet, std::memory_order_release);
  futex_wake(&page->error_state);  // GPU legs sleep on it
}

void SharedPage::ring_doorbell() {
  JobPage* page = get();
  page->doorbell.fetch_add(1);
  if (page->sleeping.exchange(0) != 0) futex_wake(&page->doorbell);
}

void SharedPage::await_no_more(size_t position) {
  if (position >= kArrivalRanks) return;
  for (Arrivals& arrivals : get()->arrivals) arrivals.submitted[position].store(UINT64_MAX);
}

}  // namespace bagua
