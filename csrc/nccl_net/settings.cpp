#include "nccl_net/settings.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>

#include "nccl_net/log.h"
#include "net/pacing.h"

extern char** environ;

namespace bagua::nccl_net {
namespace {

constexpr char kPrefix[] = "BAGUA_NET_";
constexpr const char* kNames[] = {"STREAMS", "CHUNK",           "INLINE",       "THREADS",
                                  "HELP",    "CONNECT_TIMEOUT", "PEER_TIMEOUT", "STATS"};

// Allowed range of a number in the environment.
struct Range {
  const char* name;
  uint64_t low;
  uint64_t high;
  uint64_t standard;
  bool bytes;  // accepts the suffixes K, M and G
};

std::string shown(const Range& range, uint64_t value) {
  if (range.bytes && value >= 1024 && value % 1024 == 0) {
    const bool mebi = value % (1 << 20) == 0;
    return std::to_string(value >> (mebi ? 20 : 10)) + (mebi ? "M" : "K");
  }
  return std::to_string(value);
}

uint64_t read(const Range& range) {
  const std::string name = std::string(kPrefix) + range.name;
  const char* text = std::getenv(name.c_str());
  if (text == nullptr || *text == '\0') return range.standard;
  uint64_t value = 0;
  const bool number = range.bytes || std::strspn(text, "0123456789") == std::strlen(text);
  if (number && parse_bytes(text, &value) && value >= range.low && value <= range.high) return value;
  BAGUA_NET_WARN(name + "='" + text + "' can't be used: it must be a " + (range.bytes ? "size" : "number") + " from " +
                 shown(range, range.low) + " to " + shown(range, range.high) + "; the default " +
                 shown(range, range.standard) + " is used");
  return range.standard;
}

void warn_of_unknown_names() {
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    if (std::strncmp(*entry, kPrefix, sizeof kPrefix - 1) != 0) continue;
    const std::string name(*entry, std::strcspn(*entry, "="));
    const bool known = std::any_of(std::begin(kNames), std::end(kNames), [&](const char* item) {
      return name.compare(sizeof kPrefix - 1, name.npos, item) == 0;
    });
    if (known) continue;
    std::string all;
    for (const char* item : kNames) all += std::string(all.empty() ? "" : ", ") + kPrefix + item;
    BAGUA_NET_WARN("there is no setting " + name + ": it has no effect. The settings are " + all);
  }
}

}  // namespace

int usable_cores() {
  cpu_set_t set;
  if (::sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return static_cast<int>(std::max(1L, ::sysconf(_SC_NPROCESSORS_ONLN)));
}

bool parse_bytes(const std::string& text, uint64_t* out) {
  const char* end = text.data() + text.size();
  uint64_t value = 0;
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop == text.data()) return false;
  int shift = 0;
  if (stop != end) {
    const char unit = static_cast<char>(*stop & ~0x20);  // upper case
    shift = unit == 'K' ? 10 : unit == 'M' ? 20 : unit == 'G' ? 30 : -1;
    if (shift < 0 || stop + 1 != end) return false;
  }
  if (value > (uint64_t{1} << 62) >> shift) return false;
  *out = value << shift;
  return true;
}

Settings read_settings() {
  warn_of_unknown_names();
  if (Status status = check_congestion_setting(); !status) {
    BAGUA_NET_WARN(status.message() + "; the system's congestion control is used");
  }
  // Threads of the program and of NCCL keep two or three cores per rank busy. A helper that shares a core with them
  // costs more than it brings: the system may suspend it while it holds a socket.
  const char* local = std::getenv("LOCAL_WORLD_SIZE");
  const int ranks = std::clamp(local != nullptr ? std::atoi(local) : 1, 1, 1024);
  const auto threads = static_cast<uint64_t>(std::clamp(usable_cores() / ranks / 4, 0, 2));
  Settings out;
  out.streams = static_cast<int>(read({"STREAMS", 1, kMaxStreams, 4, false}));
  out.chunk_bytes = read({"CHUNK", 16 << 10, 64 << 20, 128 << 10, true});
  out.inline_bytes = read({"INLINE", 0, 1 << 20, 32 << 10, true});
  out.threads = static_cast<int>(read({"THREADS", 0, kMaxThreads, threads, false}));
  out.help_bytes = read({"HELP", 0, uint64_t{1} << 40, 512 << 10, true});
  out.connect_timeout_s = static_cast<int>(read({"CONNECT_TIMEOUT", 1, 3600, 60, false}));
  out.peer_timeout_s = static_cast<int>(read({"PEER_TIMEOUT", 0, 3600, 30, false}));
  const char* stats = std::getenv("BAGUA_NET_STATS");
  out.stats = stats == nullptr || std::strcmp(stats, "0") == 0 ? "" : stats;
  return out;
}

const Settings& settings() {
  static const Settings instance = read_settings();
  return instance;
}

}  // namespace bagua::nccl_net
