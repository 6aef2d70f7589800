#include "kernel/copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernel/lanes.h"

namespace bagua {

void copy_streaming(void* to, const void* from, size_t bytes) {
  char* out = static_cast<char*>(to);
  const char* in = static_cast<const char*>(from);
  const size_t head = std::min(bytes, (64 - reinterpret_cast<uintptr_t>(out) % 64) % 64);
  std::memcpy(out, in, head);
  size_t done = head;
  for (; bytes - done >= kGroupBytes; done += kGroupBytes) {
    Vector<uint8_t> group[kVectors];
    std::memcpy(group, in + done, kGroupBytes);
    store_vectors(group, kVectors, out + done, true);
  }
  std::memcpy(out + done, in + done, bytes - done);
  store_fence();
}

}  // namespace bagua
