// CUDA's memory, played: NCCL calls these in the place of its own functions.
#pragma once

#include <cstddef>

#include "nccl_net/real_nccl/layout.h"

namespace bagua::nccl_net::real {

Result get_device(int* device);
Result host_calloc(char** pointer, size_t size, const char*, int);
// The real one waits for the GPU: time in which a network that did not let go of the memory goes on writing.
Result host_free(void* memory);
Result device_free(char* memory);

// Bytes that somebody wrote to memory after it was given back; lets go of it.
size_t overwritten();

}  // namespace bagua::nccl_net::real
