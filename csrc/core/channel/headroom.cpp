#include "channel/headroom.h"

#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
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

// The number that a file holds; false for "max" and where there is none.
bool number_in(const std::string& path, uint64_t* out) {
  std::ifstream file(path);
  return static_cast<bool>(file >> *out);
}

uint64_t stat_line(const std::string& path, const std::string& wanted) {
  std::ifstream file(path);
  std::string name;
  uint64_t value = 0;
  while (file >> name >> value) {
    if (name == wanted) return value;
  }
  return 0;
}

void look_at(const std::string& folder, const Files& files, Headroom* room) {
  uint64_t limit = 0, usage = 0;
  if (!number_in(folder + "/" + files.limit, &limit) || !number_in(folder + "/" + files.usage, &usage)) return;
  if (usage > limit) return;  // the kernel lets no group exceed a limit: it does not enforce this one
  for (const char* line : files.droppable) usage -= std::min(usage, stat_line(folder + "/memory.stat", line));
  tighten(room, limit - usage, "the memory limit of its control group");
}

bool exists(const std::string& path) {
  struct stat info;
  return stat(path.c_str(), &info) == 0;
}

// `path` and its ancestors up to the mount. In a container the path may be one of the host's: then the mount is ours.
void climb(const std::string& mount, std::string path, const Files& files, Headroom* room) {
  while (path.size() > 1 && exists(mount + path)) {
    look_at(mount + path, files, room);
    path.resize(path.rfind('/'));
  }
  look_at(mount, files, room);
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

uint64_t available_memory() {
  FILE* file = fopen("/proc/meminfo", "re");
  if (file == nullptr) return 0;
  char line[128];
  unsigned long long kib = 0;
  while (fgets(line, sizeof line, file) != nullptr) {
    if (sscanf(line, "MemAvailable: %llu kB", &kib) == 1) break;
  }
  fclose(file);
  return kib * 1024;
}

Headroom cgroup_headroom(const std::string& membership, const std::string& mount) {
  Headroom room;
  std::istringstream lines(membership);  // number:controllers:path, version 2 without controllers
  for (std::string line; std::getline(lines, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1), path = line.substr(second + 1);
    if (controllers.empty()) {
      climb(mount, path, kVersion2, &room);
    } else if (lists(controllers, "memory")) {
      climb(mount + "/memory", path, kVersion1, &room);
    }
  }
  return room;
}

Headroom memory_headroom() {
  std::ifstream file("/proc/self/cgroup");
  std::stringstream membership;
  membership << file.rdbuf();
  Headroom room = cgroup_headroom(membership.str(), "/sys/fs/cgroup");
  if (const uint64_t available = available_memory(); available != 0) {
    tighten(&room, available, "the memory available on this host");
  }
  address_space(&room);
  return room;
}

}  // namespace bagua
