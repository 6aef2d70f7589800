#include "engine/values/shared_page.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "channel/futex.h"
#include "channel/meeting.h"

namespace bagua {

Status SharedPage::open() {
  if (Status status = Mapping::create(sizeof(JobPage), &descriptor_, &memory_); !status) return status;
  new (memory_->data()) JobPage();
  return Status::ok();
}

void SharedPage::ring_doorbell() {
  JobPage* page = get();
  page->doorbell.fetch_add(1);
  if (page->sleeping.exchange(0) != 0) futex_wake(&page->doorbell);
}

void SharedPage::tell_change() {
  get()->changes.fetch_add(1);
  futex_wake(&get()->changes);
}

Status SharedSheet::open(const Membership& membership, bool elastic) {
  const auto pages = Pages::kOnDemand;  // few rooms are used, and little of each
  if (Status status = Mapping::create(kGenerationBytes, &descriptor_, &memory_, pages); !status) return status;
  GenerationPage* page = new (memory_->data()) GenerationPage();
  page->host_index = static_cast<uint32_t>(membership.host_index);
  page->generation = membership.generation;
  page->world_size = static_cast<uint32_t>(membership.world_size());
  page->hosts = static_cast<uint32_t>(membership.hosts.size());
  page->elastic = elastic ? 1 : 0;
  page->lobby = membership.lobby ? 1 : 0;
  const std::vector<int>& local = membership.local_ranks();
  page->local_ranks = static_cast<uint32_t>(local.size());
  for (size_t i = 0; i < local.size() && i < kArrivalRanks; ++i) page->ranks[i] = static_cast<uint32_t>(local[i]);
  for (size_t host = 0; host < membership.hosts.size(); ++host) {
    for (const int rank : membership.hosts[host]) {
      page->places[rank] = {static_cast<uint32_t>(host), static_cast<uint32_t>(membership.member_of(rank))};
    }
  }
  return Status::ok();
}

void SharedSheet::open_room(uint32_t room) {
  new (&get()->rooms[room]) MeetingRoom();
}

void SharedSheet::end(GenerationStatus status, const std::string& reason) {
  Words* const words = status == kGenerationSuspended ? &get()->suspension : &get()->error;
  const size_t length = std::min(reason.size(), kErrorBytes);
  memcpy(words->text, reason.data(), length);
  words->length = static_cast<uint32_t>(length);
  get()->status.store(status, std::memory_order_release);
  futex_wake(&get()->status);  // GPU legs sleep on it
  Meeting::disturb(get());
}

void SharedSheet::await_no_more(size_t position) {
  if (position >= kArrivalRanks) return;
  for (Arrivals& arrivals : get()->arrivals) arrivals.submitted[position].store(UINT64_MAX);
}

}  // namespace bagua
