// Copies to shared memory that go on beside the thread. Stricter than a device: nothing has arrived before the thread
// waits, and a thread that ends without waiting ends the program.
#pragma once

#include "cuda_runtime.h"

namespace emulation {

// Of the running fiber.
void begin_copy(void* to, const void* from, size_t bytes);
void finish_copies();

}  // namespace emulation

inline void __pipeline_memcpy_async(void* to, const void* from, size_t bytes) {
  emulation::begin_copy(to, from, bytes);
}
inline void __pipeline_commit() {}
// Only 0 is known: all copies that were committed.
inline void __pipeline_wait_prior(size_t) {
  emulation::finish_copies();
}
