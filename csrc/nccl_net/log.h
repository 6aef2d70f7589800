// Logs through NCCL's logger (NCCL_DEBUG sets the level). Until NCCL has provided it, warnings go to standard error.
// Any thread.
#pragma once

#include <string>

#include "nccl_net/nccl_net_abi.h"

namespace bagua::nccl_net {

void set_logger(Logger logger);
void log_line(LogLevel level, const char* file, int line, const std::string& text);

}  // namespace bagua::nccl_net

#define BAGUA_NET_WARN(text) bagua::nccl_net::log_line(bagua::nccl_net::kLogWarn, __FILE__, __LINE__, (text))
#define BAGUA_NET_INFO(text) bagua::nccl_net::log_line(bagua::nccl_net::kLogInfo, __FILE__, __LINE__, (text))
