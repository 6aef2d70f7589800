// Statistics of one connection as a line of JSON.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace bagua::nccl_net {

struct ConnectionStats {
  std::string direction;  // "send to", "receive from"
  std::string peer;
  double seconds = 0;                  // between its beginning and its end
  uint64_t messages = 0;               // messages begun
  uint64_t inline_bytes = 0;           // payload on the control socket
  std::vector<uint64_t> stream_bytes;  // payload on each data socket
  uint64_t stalls = 0;                 // how often a data socket had no room, or nothing to read
  bool failed = false;
};

std::string json_line(const ConnectionStats& stats);
// Appends `line` to the file `where` by one write; "1" is standard error. Logs failures.
void write_line(const std::string& where, const std::string& line);

}  // namespace bagua::nccl_net
