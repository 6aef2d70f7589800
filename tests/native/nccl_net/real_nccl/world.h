// NCCL as two ranks in one process: its library, communicators as far as networks see them, channels between the ranks'
// proxies. Played here: what the proxy's service thread hands to setup and connect.
#pragma once

#include <array>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "nccl_net/real_nccl/layout.h"
#include "nccl_net/real_nccl/library.h"

namespace bagua::nccl_net::real {

constexpr int kChannels = 2;

// CUDA's memory, played: NCCL calls these in the place of its own functions.
inline Result get_device(int* device) {
  *device = 0;
  return 0;
}

inline Result host_calloc(char** pointer, size_t size, const char*, int) {
  const size_t whole = (size + 4095) / 4096 * 4096;
  *pointer = static_cast<char*>(std::memset(std::aligned_alloc(4096, whole), 0, whole));
  return 0;
}

inline Result host_free(void* memory) {
  std::free(memory);
  return 0;
}

inline Result device_free(char* memory) {
  if (memory != nullptr) fail("device memory is freed, and there is none");
  return 0;
}

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};
using Object = std::unique_ptr<void, Free>;

inline Object zeroed(size_t size) {
  return Object(std::calloc(1, size));
}

inline void must(Result result, const char* what) {
  if (result != 0) fail("%s: error %d", what, result);
}

struct Nccl {
  explicit Nccl(const char* path);

  // As ncclCommInitRank and ncclCommDestroy do it.
  void init(void* comm) const;
  void finalize(void* comm) const;

  using Call = Result (*)(void* comm);
  Library library;
  const Transport& transport;
};

// A communicator, as far as networks see it.
class Comm {
 public:
  explicit Comm(const Nccl& nccl) : nccl_(nccl), comm_(zeroed(comm::kSize)) {
    comm::netName(get()) = std::getenv("NCCL_NET");  // ncclCommInitRank does this
    comm::trafficClass.set(get(), INT_MIN);          // NCCL_CONFIG_UNDEF_INT
    comm::commHash(get()) = 42;
    nccl.init(get());
  }
  ~Comm() { nccl_.finalize(get()); }
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;

  void* get() const { return comm_.get(); }
  const char* name() const { return *comm::ncclNet(get()); }

 private:
  const Nccl& nccl_;
  Object comm_;
};

// One end of a channel: its proxy's connection, and what it shares with the GPU.
class End {
 public:
  End(const TransportComm& calls, const Resources& fields, void* state, bool sends)
      : calls_(calls), fields_(fields), state_(state), connection_(zeroed(connection::kSize)) {
    connection::send(connection_.get()) = sends ? 1 : 0;
    connection::transport(connection_.get()) = kTransportNet;
    connection::sameProcess(connection_.get()) = 1;
  }

  void setup(const SetupReq& request, void* handle, int size) {
    SetupReq copy = request;
    int done = 0;
    must(calls_.proxySetup(connection_.get(), state_, &copy, kSetupReqSize, handle, size, &done), "proxySetup");
  }

  // Called until it says true, with the same memory, as NCCL does: networks keep their place in the handle.
  bool connect(void* arguments, size_t size) {
    char map[kConnectMapSize];
    int done = 0;
    const Result result =
        calls_.proxyConnect(connection_.get(), state_, arguments, static_cast<int>(size), map, sizeof map, &done);
    if (result != kInProgress) must(result, "proxyConnect");
    if (done != 0) connection::state(connection_.get()) = kConnConnected;
    return done != 0;
  }

  // As NCCL's proxy, when the communicator goes.
  void free() { must(calls_.proxyFree(connection_.get(), state_), "proxyFree"); }

  void* connection() const { return connection_.get(); }
  char* slot(int protocol, uint64_t step) const {
    const auto size = fields_.buffSizes(resources(), protocol) / kSteps;
    return fields_.buffers(resources(), protocol) + step % kSteps * size;
  }
  uint64_t* head() const { return &kHead(fields_.sendMem(resources())); }
  uint64_t* tail() const { return &kTail(fields_.recvMem(resources())); }
  int64_t* fifo_size(uint64_t step) const { return &kFifoSize(fields_.recvMem(resources()), step % kSteps); }

 private:
  void* resources() const { return connection::transportResources(connection_.get()); }

  const TransportComm& calls_;
  const Resources& fields_;
  void* state_;
  Object connection_;
};

struct Channel {
  End sender;
  End receiver;
  uint64_t step = 0;  // where the last operation ended
};

// Two ranks, the first of which sends to the second.
class World {
 public:
  explicit World(const Nccl& nccl);

  void connect();
  void disconnect();

  void* state(int rank) const { return states_[rank].get(); }

  std::vector<Channel> channels;

 private:
  const Nccl& nccl_;
  std::array<Comm, 2> comms_;
  std::array<Object, 2> states_;
};

// State of a rank's proxy.
inline Object state_of(const Comm& comm, int rank) {
  static uint32_t abort_flag = 0;
  Object state = zeroed(proxy_state::kSize);
  proxy_state::refCount(state.get()) = 1;
  proxy_state::tpRank(state.get()) = rank;
  proxy_state::tpnRanks(state.get()) = 2;
  proxy_state::tpLocalnRanks(state.get()) = 1;
  proxy_state::p2pnChannels(state.get()) = kChannels;
  proxy_state::nChannels(state.get()) = kChannels;
  for (int i = 0; i < kProtocols; ++i) proxy_state::buffSizes(state.get(), i) = kBufferSizes[i];
  proxy_state::ncclNet(state.get()) = comm::ncclNet(comm.get());
  if (comm::netContext.offset != kAbsent) proxy_state::netContext(state.get()) = comm::netContext(comm.get());
  proxy_state::abortFlag(state.get()) = &abort_flag;
  for (int i = 0; i < kNetAttrs; ++i) proxy_state::netAttr.set(state.get(), kUndefined, i);
  return state;
}

inline Nccl::Nccl(const char* path) : library(path), transport(*library.find<Transport*>("netTransport")) {
  int version = 0;
  library.find<Result (*)(int*)>("ncclGetVersion")(&version);
  if (version != BAGUA_REAL_NCCL) fail("this is NCCL %d, and the layouts are those of %d", version, BAGUA_REAL_NCCL);
  if (std::strcmp(transport.name, "NET") != 0) fail("netTransport is another table");
  library.replace("cudaGetDevice", reinterpret_cast<void*>(get_device));
  library.replace_all("_Z23ncclCudaHostCallocDebugIcE", reinterpret_cast<void*>(host_calloc));
  library.replace("cudaFreeHost", reinterpret_cast<void*>(host_free));
  library.replace_all("_Z12ncclCudaFreeIcE", reinterpret_cast<void*>(device_free));
}

inline void Nccl::init(void* comm) const {
  if (BAGUA_REAL_NCCL < 22200) {
    must(library.find<Result (*)()>("_Z17ncclNetPluginInitv")(), "ncclNetPluginInit");
  } else if (BAGUA_REAL_NCCL < 22700) {
    must(library.find<Call>("_Z17ncclNetPluginLoadP8ncclComm")(comm), "ncclNetPluginLoad");
  }
  must(library.find<Call>("_Z11ncclNetInitP8ncclComm")(comm), "ncclNetInit");
}

inline void Nccl::finalize(void* comm) const {
  if (BAGUA_REAL_NCCL < 22200) return;
  must(library.find<Call>("_Z15ncclNetFinalizeP8ncclComm")(comm), "ncclNetFinalize");
  if (BAGUA_REAL_NCCL < 22700) {
    must(library.find<Call>("_Z19ncclNetPluginUnloadP8ncclComm")(comm), "ncclNetPluginUnload");
  }
}

inline World::World(const Nccl& nccl)
    : nccl_(nccl), comms_{{Comm(nccl), Comm(nccl)}}, states_{{state_of(comms_[0], 0), state_of(comms_[1], 1)}} {
  std::printf("network %s\n", comms_[0].name());
}

inline void World::connect() {
  for (int i = 0; i < kChannels; ++i) {
    channels.push_back({End(nccl_.transport.send, kSendResources, state(0), true),
                        End(nccl_.transport.recv, kRecvResources, state(1), false)});
    Channel& made = channels.back();
    SendConnectArgs to_sender{};
    RecvConnectArgs to_receiver{};
    for (int& each : to_sender.netAttr) each = kUndefined;
    for (int& each : to_receiver.netAttr) each = kUndefined;
    SetupReq request{};
    request.channelId = i;
    request.tpRank = 1;
    made.receiver.setup(request, to_sender.handle, sizeof to_sender.handle);
    request.tpRank = 0;
    request.tpRemoteRank = 1;
    made.sender.setup(request, nullptr, 0);
    bool sends = false;
    bool receives = false;
    while (!sends || !receives) {
      if (!sends) sends = made.sender.connect(&to_sender, kSendConnectSize);
      if (!receives) receives = made.receiver.connect(&to_receiver, kRecvConnectSize);
    }
  }
}

inline void World::disconnect() {
  for (Channel& each : channels) each.receiver.free();
  for (Channel& each : channels) each.sender.free();
  channels.clear();
}

}  // namespace bagua::nccl_net::real
