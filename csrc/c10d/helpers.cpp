#include "c10d/helpers.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <utility>

namespace bagua::dist {

namespace {

constexpr std::chrono::seconds kIdle{10};  // after which a thread ends

}  // namespace

Helpers& Helpers::get() {
  static std::atomic<Helpers*> current{nullptr};
  const pid_t own = getpid();
  Helpers* found = current.load();
  while (found == nullptr || found->owner_ != own) {
    auto* const fresh = new Helpers(own);
    if (current.compare_exchange_strong(found, fresh)) return *fresh;
    delete fresh;
  }
  return *found;
}

void Helpers::call(std::function<void()> task) {
  const Lock lock(mutex_);
  tasks_.push_back(std::move(task));
  if (tasks_.size() <= idle_) {
    tasks_or_end_.notify_one();
  } else {
    std::thread([this] { serve(); }).detach();
  }
}

void Helpers::serve() {
  pthread_setname_np(pthread_self(), "bagua-c10d");
  Lock lock(mutex_);
  for (;;) {
    while (!tasks_.empty()) {
      std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      task = nullptr;  // what it holds may need the interpreter's lock to be freed: not under mutex_
      lock.lock();
    }
    ++idle_;
    const bool more = tasks_or_end_.wait_for(lock, kIdle, [this] { return !tasks_.empty(); });
    --idle_;
    if (!more) return;
  }
}

}  // namespace bagua::dist
