#include "channel/headroom.h"

#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <sstream>

namespace bagua {

namespace {

// How a version of control groups names its files.
struct Files {
  const char* limit;
  const char* usage;
  const char* droppable[2];  // lines of memory.stat: page cache, without shared memory
};
constexpr Files kVersion1 = {
    "memory.limit_in_bytes", "memory.usage_in_bytes", {"total_inactive_file", "total_active_file"}};
constexpr Files kVersion2 = {"memory.max", "memory.current", {"inactive_file", "active_file"}};

void tighten(Headroom* room, uint64_t bytes, const std::string& bound) {
  if (bytes >= room->bytes) return;
  room->bytes = bytes;
  room->bound = bound;
}

// Streams don't parse numbers here: another library of the program may have brought a C++ runtime of its own.
bool parse(const std::string& text, uint64_t* out) {
  return std::from_chars(text.data(), text.data() + text.size(), *out).ec == std::errc();
}

// The number that a file holds; false for "max" and where there is none.
bool number_in(const std::string& path, uint64_t* out) {
  std::ifstream file(path);
  std::string line;
  return std::getline(file, line) && parse(line, out);
}

// The number behind `name` at the beginning of a line, in bytes: "MemFree:  12 kB", "inactive_file 4096"; 0 if there is
// no such line.
uint64_t line_of(const std::string& path, const std::string& name) {
  std::ifstream file(path);
  uint64_t value = 0;
  for (std::string line; std::getline(file, line);) {
    if (line.rfind(name, 0) != 0) continue;
    const size_t digits = line.find_first_of("0123456789", name.size());
    if (digits == std::string::npos || !parse(line.substr(digits), &value)) return 0;
    return line.find(" kB", digits) == std::string::npos ? value : value * 1024;
  }
  return 0;
}

// Bytes that this process has, and its host: no group that counts it can have less than the one, or more than the
// other.
struct Bounds {
  uint64_t process, host;
};

void look_at(const std::string& folder, const Files& files, const Bounds& bounds, Headroom* room) {
  uint64_t limit = 0, usage = 0;
  if (!number_in(folder + "/" + files.limit, &limit) || !number_in(folder + "/" + files.usage, &usage)) return;
  // The kernel lets no group exceed a limit that it enforces.
  if (limit < std::max(usage, bounds.process) || usage > bounds.host) return;
  const uint64_t used = usage;
  for (const char* line : files.droppable)
    usage -= std::min(usage, line_of(folder + "/memory.stat", std::string(line) + " "));
  tighten(room, limit - usage,
          "the memory limit of its control group (" + folder + ": " + std::to_string(limit >> 20) + " MiB, of which " +
              std::to_string(used >> 20) + " MiB are in use)");
}

bool exists(const std::string& path) {
  struct stat info;
  return stat(path.c_str(), &info) == 0;
}

// `path` and its ancestors up to the mount. In a container the path may be one of the host's: then the mount is ours.
void climb(const std::string& mount, std::string path, const Files& files, const Bounds& bounds, Headroom* room) {
  while (path.size() > 1 && exists(mount + path)) {
    look_at(mount + path, files, bounds, room);
    path.resize(path.rfind('/'));
  }
  look_at(mount, files, bounds, room);
}

bool lists(const std::string& controllers, const std::string& wanted) {
  std::istringstream list(controllers);
  for (std::string one; std::getline(list, one, ',');) {
    if (one == wanted) return true;
  }
  return false;
}

void address_space(Headroom* room) {
  rlimit limit{};
  uint64_t pages = 0;
  if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return;
  if (!number_in("/proc/self/statm", &pages)) return;
  const uint64_t used = pages * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  tighten(room, limit.rlim_cur > used ? limit.rlim_cur - used : 0, "its limit of address space, ulimit -v");
}

}  // namespace

Headroom cgroup_headroom(const std::string& membership, const std::string& mount, uint64_t process, uint64_t host) {
  const Bounds bounds{process, host};
  Headroom room;
  std::istringstream lines(membership);  // number:controllers:path, version 2 without controllers
  for (std::string line; std::getline(lines, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1), path = line.substr(second + 1);
    if (controllers.empty()) {
      climb(mount, path, kVersion2, bounds, &room);
    } else if (lists(controllers, "memory")) {
      climb(mount + "/memory", path, kVersion1, bounds, &room);
    }
  }
  return room;
}

Headroom memory_headroom() {
  std::ifstream file("/proc/self/cgroup");
  std::stringstream membership;
  membership << file.rdbuf();
  const uint64_t total = line_of("/proc/meminfo", "MemTotal:"), unused = line_of("/proc/meminfo", "MemFree:");
  const uint64_t host = total > unused ? total - unused : UINT64_MAX;
  Headroom room = cgroup_headroom(membership.str(), "/sys/fs/cgroup", line_of("/proc/self/status", "RssAnon:"), host);
  if (const uint64_t available = line_of("/proc/meminfo", "MemAvailable:"); available != 0) {
    tighten(&room, available, "the memory available on this host");
  }
  address_space(&room);
  return room;
}

}  // namespace bagua
