#include "nccl_net/real_nccl/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <mutex>

#include "nccl_net/real_nccl/library.h"

namespace bagua::nccl_net::real {
namespace {

constexpr char kElse = 0x5a;  // in memory that was given back and belongs to somebody else now

std::mutex memory_mutex;
std::map<void*, size_t> in_use;      // memory_mutex
std::map<void*, size_t> given_back;  // memory_mutex

}  // namespace

Result get_device(int* device) {
  *device = 0;
  return 0;
}

Result host_calloc(char** pointer, size_t size, const char*, int) {
  void* memory = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (memory == MAP_FAILED) fail("no memory");
  const std::lock_guard<std::mutex> lock(memory_mutex);
  in_use[memory] = size;
  *pointer = static_cast<char*>(memory);
  return 0;
}

Result host_free(void* memory) {
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

Result device_free(char* memory) {
  if (memory != nullptr) fail("device memory is freed, and there is none");
  return 0;
}

size_t overwritten() {
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
