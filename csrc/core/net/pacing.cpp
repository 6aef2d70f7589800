#include "net/pacing.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cstdlib>
#include <string>

#include "net/socket.h"

namespace bagua {
namespace {

constexpr const char* kVariable = "BAGUA_TCP_CONGESTION";

std::string setting() {
  const char* value = std::getenv(kVariable);
  return value == nullptr || *value == '\0' ? "auto" : value;
}

// Name of the congestion control; empty if this is no TCP socket.
std::string congestion(int fd) {
  char name[17] = {};
  socklen_t length = sizeof name - 1;
  return ::getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &length) == 0 ? name : "";
}

bool set_congestion(int fd, const std::string& name) {
  return ::setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name.data(), static_cast<socklen_t>(name.size())) == 0;
}

bool paces(const std::string& name) {
  return name.rfind("bbr", 0) == 0;
}

}  // namespace

Status check_congestion_setting() {
  const std::string value = setting();
  if (value == "auto" || value == "system") return Status::ok();
  return {Code::kInvalid, std::string(kVariable) + " is '" + value + "': set it to auto or system, or not at all"};
}

void begin_without_pacing(int fd) {
  if (setting() != "auto" || !paces(congestion(fd))) return;
  if (!set_congestion(fd, "cubic")) static_cast<void>(set_congestion(fd, "reno"));
}

void pace_if_far(int fd, uint32_t near_us) {
  if (setting() != "auto") return;
  const Fd fresh(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fresh.valid()) return;
  const std::string chosen = congestion(fresh.get());
  if (!paces(chosen) || congestion(fd) == chosen) return;
  const int64_t round_trip_ns = shortest_round_trip_ns(fd);
  if (round_trip_ns >= 0 && round_trip_ns <= int64_t{near_us} * 1000) return;
  static_cast<void>(set_congestion(fd, chosen));
}

}  // namespace bagua
