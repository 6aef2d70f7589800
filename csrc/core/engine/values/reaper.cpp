#include "engine/values/reaper.h"

namespace bagua {

Reaper::~Reaper() {
  std::thread thread;
  {
    const Lock lock(mutex_);
    ending_ = true;
    thread.swap(thread_);
    changed_.notify_all();
  }
  if (thread.joinable()) thread.join();
}

void Reaper::take(Memory memory) {
  if (memory.empty()) return;
  const Lock lock(mutex_);
  for (auto& one : memory) left_.push_back(std::move(one));
  if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  changed_.notify_all();
}

void Reaper::finish() {
  Lock lock(mutex_);
  changed_.wait(lock, [this]() REQUIRES(mutex_) { return left_.empty() && !busy_; });
}

void Reaper::run() {
  Lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this]() REQUIRES(mutex_) { return ending_ || !left_.empty(); });
    if (left_.empty()) return;
    Memory mine;
    mine.swap(left_);
    busy_ = true;
    lock.unlock();
    mine.clear();
    lock.lock();
    busy_ = false;
    changed_.notify_all();
  }
}

}  // namespace bagua
