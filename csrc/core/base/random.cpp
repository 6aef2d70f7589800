#include "base/random.h"

#include <sys/random.h>

#include <cerrno>

#include "base/text.h"

namespace bagua {

Status fill_random(void* data, size_t n) {
  char* at = static_cast<char*>(data);
  while (n > 0) {
    const ssize_t got = ::getrandom(at, n, 0);
    if (got < 0) {
      if (errno == EINTR) continue;
      return {Code::kInternal, "the kernel gives no random bytes: " + errno_text(errno)};
    }
    at += got;
    n -= static_cast<size_t>(got);
  }
  return Status::ok();
}

}  // namespace bagua
