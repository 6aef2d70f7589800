#include "gpu/leg/waits.h"

#include "base/clock.h"

namespace bagua::device {

uint64_t Waits::add(std::function<Waiting()> look) {
  std::lock_guard<std::mutex> lock(mutex_);
  looks_[next_] = std::move(look);
  return next_++;
}

void Waits::remove(uint64_t id) {
  std::lock_guard<std::mutex> lock(mutex_);
  looks_.erase(id);
}

Waiting Waits::longest() {
  std::lock_guard<std::mutex> lock(mutex_);
  Waiting found;
  for (const auto& [id, look] : looks_) {
    Waiting one = look();
    if (one.since_ns != 0 && (found.since_ns == 0 || one.since_ns < found.since_ns)) found = std::move(one);
  }
  return found;
}

Waits::Here::Here(Waits* waits, std::string what)
    : waits_(waits), id_(waits->add([waiting = Waiting{now_ns(), std::move(what)}] { return waiting; })) {}

}  // namespace bagua::device
