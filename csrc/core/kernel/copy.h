// Copies large blocks of memory without filling the caches.
#pragma once

#include <cstddef>

namespace bagua {

// memcpy() with non-temporal stores, for results that nobody reads soon. The processor need not read a cache line
// before it is written. The two must not overlap.
void copy_streaming(void* to, const void* from, size_t bytes);

}  // namespace bagua
