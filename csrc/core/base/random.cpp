#include "base/random.h"

#include <unistd.h>

#include <cerrno>

#include "base/text.h"

namespace bagua {

Status fill_random(void* data, size_t n) {
  if (::getentropy(data, n) == 0) return Status::ok();
  return {Code::kInternal, "the kernel gives no random bytes: " + errno_text(errno)};
}

}  // namespace bagua
