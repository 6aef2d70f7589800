// Sleeps on a word of shared memory, and wakes threads that do (futex).
#pragma once

#include <atomic>
#include <cstdint>

namespace bagua {

enum class Wake { kWoken, kTimeout, kInterrupted };

// Sleeps while *word == expected, until the deadline (now_ns() of base/clock.h; < 0: none). May wake for no reason.
Wake futex_wait(std::atomic<uint32_t>* word, uint32_t expected, int64_t deadline_ns);
void futex_wake(std::atomic<uint32_t>* word, int waiters = INT32_MAX);

// Tells the core that this is a spin loop.
inline void spin_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace bagua
