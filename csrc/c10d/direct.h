// All-gather and reduce-scatter of large tensors among ranks of one host that may read each other's memory
// (process_vm_readv): each rank takes what it needs from where it lies, without a stage in shared memory. Two small
// all-reduces frame it: the first one tells where the tensors are, so all are ready; after the second one nobody reads
// them any more.
//
// Thread safety: any thread.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "c10d/elements.h"
#include "c10d/host.h"

namespace bagua::dist {

// Less is not worth two more operations.
constexpr size_t kLeastDirect = 128 << 10;  // bytes of a block

// Whether this process may read that one's memory, and finds `nonce` there.
bool can_read(pid_t pid, uint64_t address, uint64_t nonce);

// The members' processes, in the order of the group, and where their tensors are.
struct Peers {
  std::vector<pid_t> processes;
  int own = 0;
  std::vector<uint64_t> places;
};

// Errors are thrown as c10::DistBackendError.
void gather_directly(const Peers& peers, const char* src, char* dst, size_t bytes);
void reduce_directly(const Peers& peers, const Host& host, const Reduction& reduction, const char* src, char* dst,
                     size_t count);

}  // namespace bagua::dist
