#include "engine/values/vault.h"

#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>

#include "base/text.h"

namespace bagua {

namespace {

constexpr uint64_t kVaultMagic = 0x3154'4c55'4156'4742;  // "BGVAULT1", little-endian

Status vault_failed(const char* what) {
  return {Code::kResource, std::string(what) + " memory of the job failed: " + errno_text(errno)};
}

void give_back(int file, uint64_t place, uint64_t bytes) {
  fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(place), static_cast<off_t>(bytes));
}

}  // namespace

struct Vault::Header {
  uint64_t magic;
  std::atomic<uint64_t> index;  // its place; 0: none. It begins with the number of words that follow
};

Vault::Area::~Area() {
  if (data_ == nullptr) return;
  munmap(data_, bytes_);
  if (place_ != 0) give_back(file_->get(), place_, bytes_);
}

void Vault::Area::swap(Area& other) {
  std::swap(file_, other.file_);
  std::swap(place_, other.place_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
}

size_t Vault::page() {
  return static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

Status Vault::open(int file) {
  Fd own = file < 0 ? Fd(memfd_create("bagua-job", MFD_CLOEXEC)) : duplicate(file);
  if (!own.valid()) return vault_failed("opening");
  struct stat info{};
  if (fstat(own.get(), &info) != 0) return vault_failed("looking at");
  const bool fresh = info.st_size == 0;
  if (fresh && ftruncate(own.get(), static_cast<off_t>(page())) != 0) return vault_failed("sizing");
  if (!fresh && static_cast<size_t>(info.st_size) < page()) return {Code::kInvalid, "this is no memory of a job"};
  file_ = std::make_shared<Fd>(std::move(own));
  {
    const Lock lock(mutex_);
    end_ = fresh ? page() : static_cast<uint64_t>(info.st_size);
  }
  if (Status status = map(0, page(), &header_); !status) return status;
  if (fresh) header()->magic = kVaultMagic;
  return Status::ok();
}

Status Vault::map(uint64_t place, uint64_t bytes, Area* out) const {
  void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file_->get(), static_cast<off_t>(place));
  if (data == MAP_FAILED) return vault_failed("mapping");
  Area area;
  area.file_ = file_;
  area.place_ = place;
  area.data_ = static_cast<char*>(data);
  area.bytes_ = bytes;
  *out = std::move(area);
  return Status::ok();
}

Status Vault::make(uint64_t bytes, Area* out) {
  bytes = (std::max<uint64_t>(bytes, 1) + page() - 1) / page() * page();
  uint64_t place = 0;
  {
    const Lock lock(mutex_);
    place = end_;
    if (ftruncate(file_->get(), static_cast<off_t>(end_ + bytes)) != 0) return vault_failed("sizing");
    end_ += bytes;
  }
  return map(place, bytes, out);
}

Status Vault::find(uint64_t place, uint64_t bytes, Area* out) {
  bytes = (std::max<uint64_t>(bytes, 1) + page() - 1) / page() * page();
  {
    const Lock lock(mutex_);
    if (place == 0 || place % page() != 0 || place >= end_ || bytes > end_ - place) {
      return {Code::kCorrupt, "an index of the job's memory names what is not there"};
    }
  }
  return map(place, bytes, out);
}

void Vault::keep_only(Places areas) {
  if (index_.place() != 0) areas.emplace_back(index_.place(), index_.bytes());
  std::sort(areas.begin(), areas.end());
  const Lock lock(mutex_);
  areas.emplace_back(end_, 0);
  uint64_t from = page();
  for (const auto& [place, bytes] : areas) {
    if (place > from) give_back(file_->get(), from, place - from);
    from = std::max(from, place + bytes);
  }
}

Vault::Words Vault::index() {
  const uint64_t place = header()->index.load(std::memory_order_acquire);
  Area found;
  if (header()->magic != kVaultMagic || !find(place, page(), &found)) return {};
  uint64_t count = 0;
  memcpy(&count, found.data(), sizeof count);
  found.place_ = 0;  // it goes on with its whole length
  if (count > UINT32_MAX || !find(place, (1 + count) * sizeof count, &index_)) return {};
  Words words(count);
  memcpy(words.data(), index_.data() + sizeof count, count * sizeof count);
  return words;
}

void Vault::publish(const Words& index) {
  const uint64_t count = index.size();
  Area next;
  if (count > 0 && make((1 + count) * sizeof count, &next)) {
    memcpy(next.data(), &count, sizeof count);
    memcpy(next.data() + sizeof count, index.data(), count * sizeof count);
  }
  header()->index.store(next.place(), std::memory_order_release);
  index_ = std::move(next);
}

}  // namespace bagua
