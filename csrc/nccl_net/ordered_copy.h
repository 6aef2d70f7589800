// A copy in ascending order, for a reader that polls the destination.
#pragma once

#include <cstdint>
#include <cstring>

namespace bagua::nccl_net {

// Copies in ascending order, each aligned word of 8 bytes at once. NCCL's LL protocol polls the buffer that it receives
// into, whose words have 4 bytes of data and a flag that marks them as valid. memcpy() begins at both ends, so the flag
// could appear before the data. If `to` is not aligned (NCCL's buffers are, but pieces of a message may not be), single
// bytes are copied in ascending order.
inline void copy_in_order(char* to, const char* from, size_t bytes) {
  const auto aligned = [&](size_t size) { return reinterpret_cast<uintptr_t>(to) % size == 0; };
  const auto copy_byte = [&] {
    __atomic_store_n(to++, *from++, __ATOMIC_RELEASE);
    --bytes;
  };
  const auto copy_word = [&] {
    uint64_t word;
    std::memcpy(&word, from, sizeof word);
    __atomic_store_n(reinterpret_cast<uint64_t*>(to), word, __ATOMIC_RELEASE);
    to += sizeof word;
    from += sizeof word;
    bytes -= sizeof word;
  };
  while (bytes > 0 && !aligned(8)) copy_byte();
#if defined(__x86_64__)
  // Copies two words at once, in half the time. x86 makes stores visible in order, and volatile keeps the compiler from
  // reordering them.
  using Words = uint64_t __attribute__((vector_size(16), may_alias));
  if (bytes >= 8 && !aligned(16)) copy_word();
  for (; bytes >= sizeof(Words); bytes -= sizeof(Words)) {
    Words words;
    std::memcpy(&words, from, sizeof words);
    *reinterpret_cast<volatile Words*>(to) = words;
    to += sizeof words;
    from += sizeof words;
  }
#endif
  while (bytes >= 8) copy_word();
  while (bytes > 0) copy_byte();
}

}  // namespace bagua::nccl_net
