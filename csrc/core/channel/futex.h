// Sleeps on a word of shared memory, and wakes threads that do (futex).
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>

namespace bagua {

// Sleeps while *word == expected, until the deadline (now_ns() of base/clock.h; < 0: none). False: the deadline has
// passed, or a signal came. May wake for no reason.
inline bool futex_wait(std::atomic<uint32_t>* word, uint32_t expected, int64_t deadline_ns) {
  const timespec until{deadline_ns / 1'000'000'000, deadline_ns % 1'000'000'000};
  // FUTEX_WAIT_BITSET takes an absolute time of CLOCK_MONOTONIC; not FUTEX_PRIVATE: the word is shared by processes.
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT_BITSET, expected,
                 deadline_ns >= 0 ? &until : nullptr, nullptr, FUTEX_BITSET_MATCH_ANY) == 0 ||
         errno == EAGAIN;
}

inline void futex_wake(std::atomic<uint32_t>* word, int waiters = INT32_MAX) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE, waiters, nullptr, nullptr, 0);
}

// Tells the core that this is a spin loop.
inline void spin_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace bagua
