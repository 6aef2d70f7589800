// Settings of the plugin from the environment, BAGUA_NET_*, read once. Bad values are logged with the allowed range and
// the default that is used instead; unknown names are logged, too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace bagua::nccl_net {

constexpr int kMaxStreams = 32;  // data sockets of one connection
constexpr int kMaxThreads = 16;

struct Settings {
  int streams;            // data sockets of a connection; the sender's setting counts
  size_t chunk_bytes;     // of a large message: what one socket carries before it asks for more
  size_t inline_bytes;    // messages up to this size travel with their header on the control socket
  int threads;            // helpers of the process
  size_t help_bytes;      // with so much outstanding on a connection, a helper joins in
  int connect_timeout_s;  // how long a peer that listens may refuse, or may not be reached
  int peer_timeout_s;     // how long sent bytes may stay without any acknowledgement; 0: as long as TCP tries
  std::string stats;      // "": none, "1": standard error, else a file that lines are appended to
};

// Cores that this process may use.
int usable_cores();
// Reads the environment; warnings are logged.
Settings read_settings();
// The settings of the process, read at the first call.
const Settings& settings();

// "64K", "1M", "131072": bytes. False if it is no such number or above 2^62.
bool parse_bytes(const std::string& text, uint64_t* out);

}  // namespace bagua::nccl_net
