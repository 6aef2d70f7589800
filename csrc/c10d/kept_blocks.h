// Large blocks of torch's CPU memory, kept when they are freed for the next one of about the same size.
//
// FSDP gathers and frees each of its units in every pass. Blocks that go back to the kernel are faulted in again page
// by page, which takes as long as some models compute; in the heap they leave holes, until it is several times the
// model.
#pragma once

#include <cstddef>

namespace bagua::dist {

struct BlockBytes {
  size_t used = 0, kept = 0;
  size_t most = 0;  // that were in use at once: used and kept together never exceed it
};

// From now on, for new tensors on the CPU. Again: does nothing.
void keep_blocks();

BlockBytes block_bytes();

}  // namespace bagua::dist
