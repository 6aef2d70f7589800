// CRC-32C (Castagnoli), the checksum of frames. Pure functions, any thread, any alignment.
#pragma once

#include <cstddef>
#include <cstdint>

namespace bagua {

// Checksum of `n` bytes. `seed` is the checksum of the bytes before them: crc32c(b, crc32c(a)) is the checksum of a
// followed by b.
uint32_t crc32c(const void* data, size_t n, uint32_t seed = 0);

// The table-driven version, for processors without SSE 4.2 and as a reference in tests.
uint32_t crc32c_portable(const void* data, size_t n, uint32_t seed = 0);

}  // namespace bagua
