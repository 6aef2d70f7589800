// The monotonic clock. All deadlines of the core are instants on it.
#pragma once

#include <time.h>

#include <cstdint>

namespace bagua {

constexpr int64_t kNsPerMs = 1'000'000;
constexpr int64_t kNsPerS = 1'000'000'000;

// CLOCK_MONOTONIC in nanoseconds.
inline int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t{t.tv_sec} * kNsPerS + t.tv_nsec;
}

// The same of the clock that goes on while the machine is suspended.
inline int64_t boottime_ns() {
  timespec t;
  clock_gettime(CLOCK_BOOTTIME, &t);
  return int64_t{t.tv_sec} * kNsPerS + t.tv_nsec;
}

// Milliseconds from now to `deadline_ns`, for poll(2) and epoll_wait(2): rounded up, never negative. A negative
// `deadline_ns` gives -1: no limit.
inline int timeout_ms(int64_t deadline_ns) {
  if (deadline_ns < 0) return -1;
  const int64_t left = deadline_ns - now_ns();
  if (left <= 0) return 0;
  const int64_t ms = (left + kNsPerMs - 1) / kNsPerMs;
  return ms > 1'000'000'000 ? 1'000'000'000 : static_cast<int>(ms);
}

}  // namespace bagua
