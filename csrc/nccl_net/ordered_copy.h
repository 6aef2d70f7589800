// A copy that others watch.
#pragma once

#include <cstdint>
#include <cstring>

namespace bagua::nccl_net {

// Copies ascending, each aligned word of 8 bytes at once. NCCL's LL protocol polls the buffer that it receives into:
// there a word is 4 bytes of data and the flag that says so, and memcpy, which begins at both ends, has shown the flag
// before the data. Where `to` is not aligned to words (NCCL's buffers are, but not pieces of a message), bytes ascend.
inline void copy_in_order(char* to, const char* from, size_t bytes) {
  const auto copy_byte = [&] {
    __atomic_store_n(to++, *from++, __ATOMIC_RELEASE);
    --bytes;
  };
  while (bytes > 0 && reinterpret_cast<uintptr_t>(to) % sizeof(uint64_t) != 0) copy_byte();
  for (; bytes >= sizeof(uint64_t); bytes -= sizeof(uint64_t)) {
    uint64_t word;
    std::memcpy(&word, from, sizeof word);
    __atomic_store_n(reinterpret_cast<uint64_t*>(to), word, __ATOMIC_RELEASE);
    to += sizeof word;
    from += sizeof word;
  }
  while (bytes > 0) copy_byte();
}

}  // namespace bagua::nccl_net
