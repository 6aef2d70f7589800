// The number of all that hosts, ranks and daemons of one job say to each other, shared memory included: one for the
// whole process. Its home is csrc/wire_version.py; csrc.load() tells it.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace bagua {

inline std::atomic<uint32_t> wire_version{0};

// Says that two can't talk, and what to do.
inline std::string other_wire_version(const std::string& who, uint32_t theirs, uint32_t mine) {
  return who + " speaks wire version " + std::to_string(theirs) + ", this one wire version " + std::to_string(mine) +
         ": install one release of bagua for both, and start the older one again";
}

}  // namespace bagua
