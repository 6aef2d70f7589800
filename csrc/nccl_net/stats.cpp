#include "nccl_net/stats.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <numeric>

#include "base/fd.h"
#include "base/text.h"
#include "nccl_net/log.h"

namespace bagua::nccl_net {

std::string json_line(const ConnectionStats& stats) {
  const uint64_t data = std::accumulate(stats.stream_bytes.begin(), stats.stream_bytes.end(), uint64_t{0});
  char seconds[32];
  std::snprintf(seconds, sizeof seconds, "%.6f", stats.seconds);
  std::string out = "{\"pid\": " + std::to_string(::getpid()) + ", \"direction\": \"" +
                    (stats.direction.compare(0, 4, "send") == 0 ? "send" : "receive") + "\", \"peer\": \"" +
                    stats.peer + "\", \"seconds\": " + seconds + ", \"messages\": " + std::to_string(stats.messages) +
                    ", \"bytes\": " + std::to_string(data + stats.inline_bytes) +
                    ", \"inline_bytes\": " + std::to_string(stats.inline_bytes) + ", \"stream_bytes\": [";
  for (size_t i = 0; i < stats.stream_bytes.size(); ++i) {
    out += (i == 0 ? "" : ", ") + std::to_string(stats.stream_bytes[i]);
  }
  return out + "], \"stalls\": " + std::to_string(stats.stalls) + ", \"failed\": " + (stats.failed ? "true" : "false") +
         "}\n";
}

void write_line(const std::string& where, const std::string& line) {
  Fd file;
  if (where != "1") {
    file.reset(::open(where.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
    if (!file.valid()) {
      BAGUA_NET_WARN("can't open BAGUA_NET_STATS='" + where + "': " + errno_text(errno));
      return;
    }
  }
  const int fd = file.valid() ? file.get() : STDERR_FILENO;
  ssize_t put;
  do {
    put = ::write(fd, line.data(), line.size());
  } while (put < 0 && errno == EINTR);
  if (put < 0) BAGUA_NET_WARN("can't write BAGUA_NET_STATS='" + where + "': " + errno_text(errno));
}

}  // namespace bagua::nccl_net
