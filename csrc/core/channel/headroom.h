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

// The part of control groups: `membership` is the text of /proc/self/cgroup, `mount` is /sys/fs/cgroup. A limit is
// passed over if this process alone has more, or if the group has more than the host (both in bytes): the kernel can't
// enforce it.
Headroom cgroup_headroom(const std::string& membership, const std::string& mount, uint64_t process = 0,
                         uint64_t host = UINT64_MAX);

}  // namespace bagua
