#include "engine/values/events.h"

namespace bagua {

namespace {

constexpr size_t kMaxEvents = 10'000;  // a daemon that never reads them must not cost memory without end

}  // namespace

void EventList::tell(const char* kind, int rank, const std::string& text, int host, uint64_t generation) {
  {
    const Lock lock(mutex_);
    if (events_.size() >= kMaxEvents) return;
    events_.push_back({kind, rank, text, host, generation});
  }
  ready_.signal();
}

std::vector<Event> EventList::take() {
  const Lock lock(mutex_);
  ready_.drain();
  std::vector<Event> taken;
  taken.swap(events_);
  return taken;
}

}  // namespace bagua
