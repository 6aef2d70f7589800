// Computes the memory that this process may still take: limits of the system, of its cgroups and of itself.
#pragma once

#include <cstdint>
#include <string>

namespace bagua {

struct Headroom {
  uint64_t bytes = UINT64_MAX;  // UINT64_MAX: nothing known bounds it
  std::string bound;            // what does, for messages: "memory available on this host"
};

// The tightest of: memory that the host can give without swapping (MemAvailable), the limits of this process' control
// groups (version 1 and 2, with all ancestors; page cache that can be dropped counts as free), and RLIMIT_AS.
Headroom memory_headroom();

// The part of control groups: `membership` is the text of /proc/self/cgroup, `mount` is /sys/fs/cgroup.
Headroom cgroup_headroom(const std::string& membership, const std::string& mount);

// Bytes of memory that the machine can still give without swapping; 0 if unknown.
uint64_t available_memory();

}  // namespace bagua
