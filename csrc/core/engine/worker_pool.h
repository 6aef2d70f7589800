// Threads that share the blocks of one large operation with the thread that runs it.
//
// Thread safety: run() from one thread at a time (the dispatcher).
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

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

  std::mutex mutex_;
  std::condition_variable wanted_, finished_;
  const std::function<void(size_t)>* task_ = nullptr;  // guarded by mutex_, as are the next four
  size_t n_ = 0;
  uint64_t round_ = 0;
  size_t busy_ = 0;  // helpers inside the present round
  bool stopping_ = false;
  std::atomic<size_t> next_{0};
  std::vector<std::thread> threads_;
};

}  // namespace bagua
