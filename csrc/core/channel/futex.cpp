#include "channel/futex.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>

namespace bagua {

Wake futex_wait(std::atomic<uint32_t>* word, uint32_t expected, int64_t deadline_ns) {
  timespec until;
  timespec* limit = nullptr;
  if (deadline_ns >= 0) {
    until.tv_sec = deadline_ns / 1'000'000'000;
    until.tv_nsec = deadline_ns % 1'000'000'000;
    limit = &until;
  }
  // FUTEX_WAIT_BITSET takes an absolute time of CLOCK_MONOTONIC; not FUTEX_PRIVATE: the word is shared by processes.
  const long rc = syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT_BITSET, expected, limit, nullptr,
                          FUTEX_BITSET_MATCH_ANY);
  if (rc == 0 || errno == EAGAIN) return Wake::kWoken;
  return errno == ETIMEDOUT ? Wake::kTimeout : Wake::kInterrupted;
}

void futex_wake(std::atomic<uint32_t>* word, int waiters) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE, waiters, nullptr, nullptr, 0);
}

}  // namespace bagua
