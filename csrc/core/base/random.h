// Random bytes from the kernel, for nonces and tokens.
#pragma once

#include <cstddef>

#include "base/status.h"

namespace bagua {

Status fill_random(void* data, size_t n);  // at most 256

}  // namespace bagua
