// Measures the shortest possible time of an all-reduce inside one host: one pass over memory, without messages and
// daemon. Each rank (a thread here) reads its slice of all ranks' float32 vectors and writes the sum into that slice of
// all ranks' results, with non-temporal stores if these are large. Threads spin at a barrier before and after. It uses
// plain loops that the compiler vectorises, and no code of the core.
//
//     memory_floor RANKS MAX_BYTES
//
// Prints "ready" once memory is touched. Reads lines "BYTES REPEATS" and answers each with one line: nanoseconds per
// operation. Ends with its standard input. Not part of the core.
#include <sched.h>
#include <sys/prctl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>
#ifdef __SSE2__
#include <immintrin.h>
#endif

namespace {

constexpr size_t kBlock = 1024;                   // floats summed in the first-level cache
constexpr size_t kLine = 16;                      // floats of a cache line: slices begin on one
constexpr size_t kStreamBytes = size_t{4} << 20;  // larger results, of all ranks together, use non-temporal stores
constexpr size_t kPage = 4096;

struct Free {
  void operator()(float* p) const { std::free(p); }
};
using Vector = std::unique_ptr<float, Free>;

Vector touched(size_t bytes) {
  const size_t rounded = (bytes + kPage - 1) / kPage * kPage;
  Vector made(static_cast<float*>(std::aligned_alloc(kPage, rounded)));
  if (!made) {
    std::fprintf(stderr, "no memory for %zu bytes\n", rounded);
    std::exit(1);
  }
  std::memset(made.get(), 0, rounded);
  return made;
}

void store(float* to, const float* from, size_t count, bool stream) {
#ifdef __SSE2__
  if (stream) {
    size_t i = 0;
    for (; i + 4 <= count; i += 4) _mm_stream_ps(to + i, _mm_load_ps(from + i));
    for (; i < count; ++i) to[i] = from[i];
    return;
  }
#else
  (void)stream;
#endif
  std::memcpy(to, from, count * sizeof(float));
}

class Floor {
 public:
  Floor(int ranks, size_t max_bytes)
      : ranks_(ranks), crowded_(static_cast<unsigned>(ranks) > std::thread::hardware_concurrency()) {
    for (int r = 0; r < ranks; ++r) {
      in_.push_back(touched(max_bytes));
      out_.push_back(touched(max_bytes));
    }
    for (int r = 1; r < ranks; ++r) threads_.emplace_back([this, r] { serve(r); });
  }
  ~Floor() {
    begin(0, 0);
    for (std::thread& thread : threads_) thread.join();
  }
  Floor(const Floor&) = delete;
  Floor& operator=(const Floor&) = delete;

  // Mean time of `repeats` all-reduces of `bytes`, in nanoseconds.
  int64_t measure(size_t bytes, int repeats) {
    begin(bytes, repeats);
    wait();
    const auto start = std::chrono::steady_clock::now();
    work(0);
    const auto end = std::chrono::steady_clock::now();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(end - start).count() / repeats;
  }

 private:
  void begin(size_t bytes, int repeats) {
    const std::lock_guard<std::mutex> lock(mutex_);
    count_ = bytes / sizeof(float);
    repeats_ = repeats;
    ++turn_;
    changed_.notify_all();
  }

  void serve(int rank) {
    for (uint64_t seen = 0;;) {
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return turn_ != seen; });
        seen = turn_;
      }
      if (repeats_ == 0) return;
      wait();
      work(rank);
    }
  }

  void work(int rank) {
    const size_t lines = (count_ + kLine - 1) / kLine;
    const auto r = static_cast<size_t>(rank);
    const auto n = static_cast<size_t>(ranks_);
    const size_t first = std::min(count_, lines * r / n * kLine);
    const size_t last = std::min(count_, lines * (r + 1) / n * kLine);
    const bool stream = count_ * sizeof(float) * n > kStreamBytes;
    for (int i = 0; i < repeats_; ++i) {
      for (size_t at = first; at < last; at += kBlock) add_block(at, std::min(kBlock, last - at), stream);
#ifdef __SSE2__
      if (stream) _mm_sfence();
#endif
      wait();
    }
  }

  void add_block(size_t at, size_t count, bool stream) {
    alignas(64) float sum[kBlock];
    std::memcpy(sum, in_[0].get() + at, count * sizeof(float));
    for (size_t k = 1; k < in_.size(); ++k) {
      const float* from = in_[k].get() + at;
      for (size_t i = 0; i < count; ++i) sum[i] += from[i];
    }
    for (const Vector& out : out_) store(out.get() + at, sum, count, stream);
  }

  // Waits for all threads: spins, and yields if there are fewer cores than ranks.
  void wait() {
    const uint32_t round = round_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == ranks_) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; round_.load(std::memory_order_acquire) == round; ++spins) {
      if (crowded_ || spins > 10'000) sched_yield();
    }
  }

  const int ranks_;
  const bool crowded_;
  std::vector<Vector> in_;
  std::vector<Vector> out_;
  std::vector<std::thread> threads_;
  std::atomic<uint32_t> round_{0};
  std::atomic<int> arrived_{0};
  std::mutex mutex_;  // guards the turn; the data of a turn are written before it and read after it
  std::condition_variable changed_;
  uint64_t turn_ = 0;
  size_t count_ = 0;
  int repeats_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  const int ranks = argc == 3 ? std::atoi(argv[1]) : 0;
  const size_t max_bytes = argc == 3 ? std::strtoull(argv[2], nullptr, 10) : 0;
  if (ranks < 1 || max_bytes < sizeof(float)) {
    std::fprintf(stderr, "usage: memory_floor RANKS MAX_BYTES\n");
    return 2;
  }
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  Floor floor(ranks, max_bytes);
  std::puts("ready");
  std::fflush(stdout);
  size_t bytes = 0;
  int repeats = 0;
  while (std::scanf("%zu %d", &bytes, &repeats) == 2) {
    std::printf("%lld\n", static_cast<long long>(floor.measure(std::min(bytes, max_bytes), std::max(1, repeats))));
    std::fflush(stdout);
  }
  return 0;
}
