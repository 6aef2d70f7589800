// An operation on memory at any address, for transfer.h. By itself, for libraries that know the core by host_api.h
// alone.
#pragma once

#include <cstdint>

#include "channel/layout.h"

namespace bagua {

// An operation to carry out. Memory must stay until the transfer is over or destroyed.
struct TransferRequest {
  Descriptor descriptor{};  // all but the places; count: elements of one row
  const char* src = nullptr;
  char* dst = nullptr;    // nullptr: this rank gives, or gets, nothing. src == dst: in place
  uint64_t src_rows = 1;  // src holds so many times `count` elements
  uint64_t dst_rows = 1;
  bool together = false;    // src and dst may share a place, and do if there is no dst
  uint64_t generation = 0;  // to which it belongs; 0: the present one
  // How it is cut: the same on all ranks. whole: not at all. rows: operations of several rows are cut, too, each row
  // alike; their tensors in shared memory are then copied as others are.
  bool whole = false, rows = false;
};

}  // namespace bagua
