// Copies large memory past the caches.
#pragma once

#include <cstddef>

namespace bagua {

// memcpy() whose stores go past the caches: for results that nobody reads before they would have been evicted. Saves
// reading every line before it is written. No overlap.
void copy_streaming(void* to, const void* from, size_t bytes);

}  // namespace bagua
