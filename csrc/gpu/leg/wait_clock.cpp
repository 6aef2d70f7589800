#include "gpu/leg/wait_clock.h"

#include "base/clock.h"

namespace bagua::device {

uint64_t WaitClock::add(std::function<Waiting()> look) {
  const Lock lock(mutex_);
  looks_[next_] = std::move(look);
  return next_++;
}

void WaitClock::remove(uint64_t id) {
  const Lock lock(mutex_);
  looks_.erase(id);
}

Waiting WaitClock::longest() {
  const Lock lock(mutex_);
  Waiting found;
  for (const auto& [id, look] : looks_) {
    Waiting one = look();
    if (one.since_ns != 0 && (found.since_ns == 0 || one.since_ns < found.since_ns)) found = std::move(one);
  }
  return found;
}

WaitClock::Scope::Scope(WaitClock* clock, std::string what)
    : clock_(clock), id_(clock->add([waiting = Waiting{now_ns(), std::move(what)}] { return waiting; })) {}

}  // namespace bagua::device
