// A table of C functions through which the GPU leg (csrc/gpu/leg, a library of its own) uses a rank's channel: neither
// library needs the other's symbols. It travels in a capsule (`Rank.host_api()` in core.pyi).
//
// Every function may be called from any thread. Those that return int give a HostCode, and write the reason, cut and
// terminated, to `error`. The table lives as long as the Rank.
#pragma once

#include <cstddef>
#include <cstdint>

#include "channel/layout.h"

namespace bagua {

class ChannelClient;

constexpr uint32_t kHostApiVersion = 1;
constexpr const char* kHostApiCapsule = "bagua.host_api";

enum HostCode : int { kHostOk = 0, kHostTimeout = 1, kHostInterrupted = 2, kHostFailed = 3 };

struct HostError {
  char text[kErrorBytes + 1];
};

struct HostApi {
  uint32_t version;
  ChannelClient* client;
  int (*submit)(ChannelClient*, const Descriptor*, uint64_t* ticket, HostError*);
  // `interrupted(context)` is asked every 100 ms or so; true ends the wait with kHostInterrupted. deadline_ns < 0:
  // none.
  int (*wait)(ChannelClient*, uint64_t ticket, int64_t deadline_ns, bool (*interrupted)(void*), void* context,
              HostError*);
  int (*alloc)(ChannelClient*, uint64_t bytes, uint64_t* segment, void** data, uint64_t* size, HostError*);
  // The mapping goes at once; no operation may be in flight on it.
  int (*free)(ChannelClient*, uint64_t segment, HostError*);
  int (*create_comm)(ChannelClient*, uint32_t comm, const int32_t* ranks, size_t count, int64_t timeout_ns, HostError*);
  int (*destroy_comm)(ChannelClient*, uint32_t comm, HostError*);
  // Sleeps until the engine has failed, ended or died, or the generation is suspended: kHostFailed, with the reason.
  // kHostTimeout: not by then. May return kHostOk for no reason, and does after nudge().
  int (*wait_failure)(ChannelClient*, int64_t deadline_ns, HostError*);
  void (*nudge)(ChannelClient*);
  uint64_t (*encoded_bytes)(uint8_t codec, uint16_t density, uint64_t count);
};

HostApi host_api(ChannelClient* client);

}  // namespace bagua
