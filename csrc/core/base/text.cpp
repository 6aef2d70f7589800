#include "base/text.h"

#include <cstdio>
#include <system_error>

#include "base/clock.h"

namespace bagua {

std::string errno_text(int error) {
  return std::system_category().message(error);
}

std::string duration_text(int64_t ns) {
  char text[48];
  const double seconds = static_cast<double>(ns < 0 ? 0 : ns) / kNsPerS;
  if (seconds < 9.95) {
    std::snprintf(text, sizeof text, "%.1f s", seconds);
  } else if (seconds < 119.5) {
    std::snprintf(text, sizeof text, "%.0f s", seconds);
  } else {
    const auto whole = static_cast<int64_t>(seconds + 0.5);
    std::snprintf(text, sizeof text, "%lld min %lld s", static_cast<long long>(whole / 60),
                  static_cast<long long>(whole % 60));
  }
  return text;
}

}  // namespace bagua
