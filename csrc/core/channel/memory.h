// Memory shared between the daemon and a rank: an anonymous file of fixed, sealed size, mapped for reading and writing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/fd.h"
#include "base/status.h"

namespace bagua {

// Pages of a mapping: all are there at once, or each when it is first touched.
enum class Pages { kTouched, kOnDemand };

// One mapping; unmapped by the destructor. Shared by shared_ptr: an operation in flight keeps its memory mapped
// although its owner gave it back. Its address and size never change, so it is usable from any thread.
class Mapping {
 public:
  Mapping(void* data, size_t bytes) : data_(data), bytes_(bytes) {}
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  // Makes a memfd of `bytes` (rounded up to pages), seals its size and maps it. kResource with the reason.
  static Status create(size_t bytes, Fd* fd, std::shared_ptr<Mapping>* out, Pages pages = Pages::kTouched);
  // Maps `bytes` of a descriptor that came from the daemon; checks that the file is that large.
  static Status open(int fd, size_t bytes, std::shared_ptr<Mapping>* out, Pages pages = Pages::kTouched);
  // The same for a descriptor that came from a rank: as large as the file is, and sealed, so that nobody can cut it.
  static Status adopt(int fd, std::shared_ptr<Mapping>* out);
  // Puts another file of that size in the place of this one, at once: other threads find the one or the other there.
  Status replace(int fd, Pages pages = Pages::kTouched);

  char* data() const { return static_cast<char*>(data_); }
  size_t bytes() const { return bytes_; }

 private:
  void* const data_;
  const size_t bytes_;
};

}  // namespace bagua
