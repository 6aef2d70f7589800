#include "channel/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "base/text.h"
#include "channel/headroom.h"

namespace bagua {

namespace {

constexpr size_t kUnmapBytes = 2 << 20;

constexpr int flags_of(Pages pages) {
  return MAP_SHARED | (pages == Pages::kTouched ? MAP_POPULATE : 0);
}

Status failed(const std::string& what, size_t bytes) {
  return {Code::kResource, what + " " + std::to_string(bytes) + " bytes of shared memory failed: " + errno_text(errno)};
}

Status check_size(int fd, size_t bytes) {
  struct stat info;
  if (fstat(fd, &info) != 0) return failed("looking at", bytes);
  if (info.st_size >= 0 && static_cast<size_t>(info.st_size) >= bytes) return Status::ok();
  return {Code::kCorrupt, "the daemon passed a shared-memory file that is too small"};
}

}  // namespace

// In slices: no thread of this process can map memory while the kernel takes some away, which takes up to 0.5 ms for
// each MiB; and the memory of a lost rank goes while the next generation begins.
Mapping::~Mapping() {
  for (size_t left = bytes_; left > 0;) {
    const size_t slice = std::min(left, kUnmapBytes);
    left -= slice;
    munmap(data() + left, slice);
  }
}

Status Mapping::create(size_t bytes, Fd* fd, std::shared_ptr<Mapping>* out, Pages pages) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  if (bytes > SIZE_MAX / 2) return {Code::kInvalid, "a shared-memory size of " + std::to_string(bytes) + " bytes"};
  bytes = (bytes + page - 1) / page * page;
  // A page that can't be had later is a SIGBUS or the OOM killer: refuse in words now. On demand little of a large
  // mapping is used.
  const Headroom room = memory_headroom();
  if (pages == Pages::kTouched && bytes > room.bytes) {
    return {Code::kResource, std::to_string(bytes >> 20) + " MiB of shared memory asked for, but only " +
                                 std::to_string(room.bytes >> 20) + " MiB are left, bounded by " + room.bound};
  }
  Fd file(memfd_create("bagua", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file.valid()) return failed("creating", bytes);
  if (ftruncate(file.get(), static_cast<off_t>(bytes)) != 0) return failed("sizing", bytes);
  if (fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) return failed("sealing", bytes);
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags_of(pages), file.get(), 0);
  if (data == MAP_FAILED) return failed("mapping", bytes);
  *out = std::make_shared<Mapping>(data, bytes);
  *fd = std::move(file);
  return Status::ok();
}

Status Mapping::open(int fd, size_t bytes, std::shared_ptr<Mapping>* out, Pages pages) {
  if (Status status = check_size(fd, bytes); !status) return status;
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags_of(pages), fd, 0);
  if (data == MAP_FAILED) return failed("mapping", bytes);
  *out = std::make_shared<Mapping>(data, bytes);
  return Status::ok();
}

Status Mapping::adopt(int fd, std::shared_ptr<Mapping>* out) {
  struct stat info{};
  if (fstat(fd, &info) != 0 || info.st_size <= 0) return {Code::kInvalid, "this is no shared memory"};
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) return {Code::kInvalid, "this shared memory is not sealed"};
  return open(fd, static_cast<size_t>(info.st_size), out);
}

Status Mapping::replace(int fd, Pages pages) {
  if (Status status = check_size(fd, bytes_); !status) return status;
  const int flags = flags_of(pages) | MAP_FIXED;
  return mmap(data_, bytes_, PROT_READ | PROT_WRITE, flags, fd, 0) == MAP_FAILED ? failed("mapping", bytes_)
                                                                                 : Status::ok();
}

}  // namespace bagua
