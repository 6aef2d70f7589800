// Events of an engine for its daemon, and a descriptor that is readable while there are some.
//
// Thread safety: any thread.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "base/mutex.h"
#include "base/status.h"

namespace bagua {

struct Event {
  const char* kind;  // see Engine.events in core.pyi
  int rank;          // member number; -1: none
  std::string text;
  int host = -1;                  // "suspended": the other host that was lost, or has lost a rank
  uint64_t generation = 0;        // "suspended", "regrouped": the one that it says this of
  std::vector<int> accused = {};  // "suspended": hosts with which this one could not talk itself
  uint64_t passes = 0;            // "suspended", "regrouped": backward passes that a local rank had begun
};

class EventList {
 public:
  Status open() { return ready_.open(); }
  // Readable while there are events.
  int fd() const { return ready_.fd(); }
  void tell(const char* kind, int rank, const std::string& text, int host = -1, uint64_t generation = 0) {
    tell({kind, rank, text, host, generation});
  }
  void tell(Event event) {
    const Lock lock(mutex_);
    if (events_.size() >= kMaxEvents) return;
    events_.push_back(std::move(event));
    ready_.signal();
  }
  std::vector<Event> take() {
    const Lock lock(mutex_);
    ready_.drain();
    return std::exchange(events_, {});
  }

 private:
  static constexpr size_t kMaxEvents = 10'000;  // a daemon that never reads them must not cost memory without end

  EventFd ready_;  // constant after open()
  Mutex mutex_;
  std::vector<Event> events_ GUARDED_BY(mutex_);
};

}  // namespace bagua
