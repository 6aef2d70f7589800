// Formats durations and errno for error messages.
#pragma once

#include <cstdint>
#include <string>

namespace bagua {

// The system's text for an errno value; thread-safe.
std::string errno_text(int error);

// A duration for people to read: "0.3 s", "30 s", "2 min 5 s".
std::string duration_text(int64_t ns);

}  // namespace bagua
