#include "nccl_net/log.h"

#include <atomic>
#include <cstdio>
#include <cstring>

namespace bagua::nccl_net {
namespace {

std::atomic<Logger> current{nullptr};

}  // namespace

void set_logger(Logger logger) {
  if (logger != nullptr) current.store(logger, std::memory_order_release);
}

void log_line(LogLevel level, const char* file, int line, const std::string& text) {
  const Logger logger = current.load(std::memory_order_acquire);
  if (logger != nullptr) {
    const char* name = std::strrchr(file, '/');
    logger(level, kSubsysInit | kSubsysNet, name != nullptr ? name + 1 : file, line, "NET/Bagua : %s", text.c_str());
  } else if (level == kLogWarn) {
    std::fprintf(stderr, "NET/Bagua : %s\n", text.c_str());
  }
}

}  // namespace bagua::nccl_net
