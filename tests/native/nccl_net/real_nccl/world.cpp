#include "nccl_net/real_nccl/world.h"

#include <cstdio>
#include <cstring>

#include "nccl_net/real_nccl/memory.h"

namespace bagua::nccl_net::real {
namespace {

// State of a rank's proxy.
Object state_of(const Comm& comm, int rank) {
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

}  // namespace

Nccl::Nccl(const char* path) : library(path), transport(*library.find<Transport*>("netTransport")) {
  int version = 0;
  library.find<Result (*)(int*)>("ncclGetVersion")(&version);
  if (version != BAGUA_REAL_NCCL) fail("this is NCCL %d, and the layouts are those of %d", version, BAGUA_REAL_NCCL);
  if (std::strcmp(transport.name, "NET") != 0) fail("netTransport is another table");
  library.replace("cudaGetDevice", reinterpret_cast<void*>(get_device));
  library.replace_all("_Z23ncclCudaHostCallocDebugIcE", reinterpret_cast<void*>(host_calloc));
  library.replace("cudaFreeHost", reinterpret_cast<void*>(host_free));
  library.replace_all("_Z12ncclCudaFreeIcE", reinterpret_cast<void*>(device_free));
}

void Nccl::init(void* comm) const {
  if (BAGUA_REAL_NCCL < 22200) {
    must(library.find<Result (*)()>("_Z17ncclNetPluginInitv")(), "ncclNetPluginInit");
  } else if (BAGUA_REAL_NCCL < 22700) {
    must(library.find<Call>("_Z17ncclNetPluginLoadP8ncclComm")(comm), "ncclNetPluginLoad");
  }
  must(library.find<Call>("_Z11ncclNetInitP8ncclComm")(comm), "ncclNetInit");
}

void Nccl::finalize(void* comm) const {
  if (BAGUA_REAL_NCCL < 22200) return;
  must(library.find<Call>("_Z15ncclNetFinalizeP8ncclComm")(comm), "ncclNetFinalize");
  if (BAGUA_REAL_NCCL < 22700) {
    must(library.find<Call>("_Z19ncclNetPluginUnloadP8ncclComm")(comm), "ncclNetPluginUnload");
  }
}

World::World(const Nccl& nccl)
    : nccl_(nccl), comms_{{Comm(nccl), Comm(nccl)}}, states_{{state_of(comms_[0], 0), state_of(comms_[1], 1)}} {
  std::printf("network %s\n", comms_[0].name());
}

void World::connect() {
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

void World::disconnect(bool receivers_first) {
  for (const bool receivers : {receivers_first, !receivers_first}) {
    for (Channel& each : channels) receivers ? each.receiver.free() : each.sender.free();
  }
  channels.clear();
}

}  // namespace bagua::nccl_net::real
