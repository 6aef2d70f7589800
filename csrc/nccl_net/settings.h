// Settings of the plugin from the environment variables BAGUA_NET_*, read once. For a bad value it logs the allowed
// range and the default that is used instead. It logs unknown names, too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace bagua::nccl_net {

constexpr int kMaxStreams = 32;  // data sockets of one connection
constexpr int kMaxThreads = 16;

struct Settings {
  int streams;            // data sockets of a connection; the sender's setting counts
  size_t chunk_bytes;     // the least bytes of a large message that one socket takes at a time
  size_t inline_bytes;    // messages up to this size are sent with their header on the control socket
  int threads;            // helper threads of the process
  size_t help_bytes;      // outstanding bytes of a connection from which on a helper joins
  int connect_timeout_s;  // how long a listening peer may refuse or be unreachable
  int peer_timeout_s;     // how long sent bytes may stay unacknowledged; 0: as long as TCP tries
  std::string stats;      // "": none, "1": standard error, else a file to which lines are appended
};

// Cores that this process may use.
int usable_cores();
// Reads the environment; warnings are logged.
Settings read_settings();
// The settings of the process, read at the first call.
const Settings& settings();

// Parses "64K", "1M" or "131072" as bytes. False if the text is no such number, or above 2^62.
bool parse_bytes(const std::string& text, uint64_t* out);

}  // namespace bagua::nccl_net
