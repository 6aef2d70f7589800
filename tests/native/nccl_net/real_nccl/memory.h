// CUDA's memory, played: NCCL calls these in the place of its own functions.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <map>
#include <mutex>

#include "nccl_net/real_nccl/layout.h"
#include "nccl_net/real_nccl/library.h"

namespace bagua::nccl_net::real {

constexpr char kElse = 0x5a;  // in memory that was given back and belongs to somebody else now

inline std::mutex memory_mutex;
inline std::map<void*, size_t> in_use;      // memory_mutex
inline std::map<void*, size_t> given_back;  // memory_mutex

inline Result get_device(int* device) {
  *device = 0;
  return 0;
}

inline Result host_calloc(char** pointer, size_t size, const char*, int) {
  void* memory = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (memory == MAP_FAILED) fail("no memory");
  const std::lock_guard<std::mutex> lock(memory_mutex);
  in_use[memory] = size;
  *pointer = static_cast<char*>(memory);
  return 0;
}

// The real one waits for the GPU: time in which a network that did not let go of the memory goes on writing.
inline Result host_free(void* memory) {
  {
    const std::lock_guard<std::mutex> lock(memory_mutex);
    const auto found = in_use.find(memory);
    if (found == in_use.end()) fail("memory is freed that is not in use");
    std::memset(memory, kElse, found->second);
    given_back.insert(*found);
    in_use.erase(found);
  }
  ::usleep(10'000);
  return 0;
}

inline Result device_free(char* memory) {
  if (memory != nullptr) fail("device memory is freed, and there is none");
  return 0;
}

// Bytes that somebody wrote to memory after it was given back; lets go of it.
inline size_t overwritten() {
  const std::lock_guard<std::mutex> lock(memory_mutex);
  size_t count = 0;
  for (const auto& [memory, size] : given_back) {
    const char* bytes = static_cast<char*>(memory);
    for (size_t i = 0; i < size; ++i) count += bytes[i] != kElse;
    ::munmap(memory, size);
  }
  given_back.clear();
  return count;
}

}  // namespace bagua::nccl_net::real
