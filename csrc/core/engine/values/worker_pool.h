// Threads that share the blocks of one large operation with the thread that runs it.
//
// Thread safety: run() from one thread at a time (the dispatcher).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "base/mutex.h"

namespace bagua {

class WorkerPool {
 public:
  explicit WorkerPool(int helpers);
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  // Calls task(i) for every i in [0, n), each once, on the caller and the helpers; returns when all are done.
  void run(size_t n, const std::function<void(size_t)>& task);

 private:
  void help();
  void work(const std::function<void(size_t)>& task, size_t n);

  Mutex mutex_;
  Condition wanted_, finished_;
  const std::function<void(size_t)>* task_ GUARDED_BY(mutex_) = nullptr;
  size_t n_ GUARDED_BY(mutex_) = 0;
  uint64_t round_ GUARDED_BY(mutex_) = 0;
  size_t busy_ GUARDED_BY(mutex_) = 0;  // helpers inside the present round
  bool stopping_ GUARDED_BY(mutex_) = false;
  std::atomic<size_t> next_{0};
  std::vector<std::thread> threads_;
};

}  // namespace bagua
