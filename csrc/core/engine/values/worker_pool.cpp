#include "engine/values/worker_pool.h"

namespace bagua {

WorkerPool::WorkerPool(int helpers) {
  for (int i = 0; i < helpers; ++i) threads_.emplace_back([this] { help(); });
}

WorkerPool::~WorkerPool() {
  {
    const Lock lock(mutex_);
    stopping_ = true;
  }
  wanted_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void WorkerPool::work(const std::function<void(size_t)>& task, size_t n) {
  for (size_t i = next_.fetch_add(1); i < n; i = next_.fetch_add(1)) task(i);
}

void WorkerPool::run(size_t n, const std::function<void(size_t)>& task) {
  if (threads_.empty() || n < 2) {
    for (size_t i = 0; i < n; ++i) task(i);
    return;
  }
  {
    const Lock lock(mutex_);
    next_.store(0);
    task_ = &task;
    n_ = n;
    ++round_;
  }
  wanted_.notify_all();
  work(task, n);
  // A helper that has not woken by now finds no task and does not enter: only those inside are waited for.
  Lock lock(mutex_);
  task_ = nullptr;
  finished_.wait(lock, [this]() REQUIRES(mutex_) { return busy_ == 0; });
}

void WorkerPool::help() {
  uint64_t seen = 0;
  Lock lock(mutex_);
  for (;;) {
    wanted_.wait(lock, [this, seen]() REQUIRES(mutex_) { return stopping_ || (task_ != nullptr && round_ != seen); });
    if (stopping_) return;
    seen = round_;
    const auto* task = task_;
    const size_t n = n_;
    ++busy_;
    lock.unlock();
    work(*task, n);
    lock.lock();
    if (--busy_ == 0) finished_.notify_one();
  }
}

}  // namespace bagua
