// Small collectives between the members of a communicator through their daemons, on host memory.
//
// The leg uses them to agree on routes and to distribute NCCL ids, so both belong to the engine's generation. They
// block, and no training step uses them.
//
// Thread safety: one thread at a time.
#pragma once

#include <cstdint>

#include "gpu/leg/runtime.h"

namespace bagua::device {

class HostCollectives {
 public:
  HostCollectives(Runtime* runtime, uint32_t comm) : runtime_(runtime), comm_(comm) {}
  ~HostCollectives();
  HostCollectives(const HostCollectives&) = delete;
  HostCollectives& operator=(const HostCollectives&) = delete;

  // Gathers `bytes` bytes of each member, in the order of members, at all members. Returns an error if the leg fails.
  Status all_gather(const void* mine, void* all, uint64_t bytes, int members);
  // values[i] = maximum over all members of values[i].
  Status all_max(double* values, uint64_t count);

 private:
  Status room(uint64_t bytes);
  Status run(Descriptor descriptor);

  Runtime* const runtime_;
  const uint32_t comm_;
  uint64_t segment_ = 0, bytes_ = 0;
  char* data_ = nullptr;
};

}  // namespace bagua::device
