// Where things lie in NCCL as NVIDIA built it for x86-64 (wheels nvidia-nccl-cu12 and -cu13). The offsets are true of
// single binaries, which BAGUA_REAL_NCCL chooses from: the version as ncclGetVersion says it. Names are NCCL's. What is
// not here stays zero.
#pragma once

#if BAGUA_REAL_NCCL == 22105
#include "nccl_net/real_nccl/layout_22105.h"
#elif BAGUA_REAL_NCCL == 22501
#include "nccl_net/real_nccl/layout_22501.h"
#elif BAGUA_REAL_NCCL == 22705
#include "nccl_net/real_nccl/layout_22705.h"
#elif BAGUA_REAL_NCCL == 22809
#include "nccl_net/real_nccl/layout_22809.h"
#elif BAGUA_REAL_NCCL == 23203
#include "nccl_net/real_nccl/layout_23203.h"
#else
#error "BAGUA_REAL_NCCL is a version whose layout is not known: read_layout.py reads it"
#endif

namespace bagua::nccl_net::real {

using Result = int;                  // ncclResult_t
constexpr Result kInProgress = 7;    // ncclInProgress
constexpr int kSteps = 8;            // NCCL_STEPS: parts of a buffer
constexpr int kLl = 0, kSimple = 2;  // protocols; 1 is LL128
constexpr int kProtocols = 3;
constexpr int kTransportNet = 2;
constexpr int kConnConnected = 4;
constexpr int kAllReduce = 4, kRing = 1;
constexpr int kOpNone = 0, kOpReady = 1;
constexpr int kNetAttrs = 11;   // numbers of ncclNetAttr_t
constexpr int kUndefined = -1;  // NCCL_NET_ATTR_UNDEF

// Sizes of the buffers that NCCL gives a connection by default.
constexpr int kBufferSizes[kProtocols] = {512 << 10, 4800 << 10, 4 << 20};

// struct sendNetResources or struct recvNetResources.
struct Resources {
  Field<void*> sendMem;
  Field<void*> recvMem;
  Field<char*> buffers;                 // by protocol
  decltype(send::buffSizes) buffSizes;  // by protocol
};
constexpr Resources kSendResources{send::sendMem, send::recvMem, send::buffers, send::buffSizes};
constexpr Resources kRecvResources{recv::sendMem, recv::recvMem, recv::buffers, recv::buffSizes};

// Fields by which the GPU and the proxy tell each other their progress: struct ncclSendMem and struct ncclRecvMem.
constexpr Field<uint64_t> kHead{0};  // ncclSendMem.head: steps that are free again
constexpr Field<uint64_t> kTail{0};  // ncclRecvMem.tail: steps that are full
constexpr Field<int64_t> kFifoSize{fifo::connFifo.offset + kSizeInConnFifo, kConnFifoSize};

// NCCL's structs that go to calls of a transport; versions know the first bytes of each, so many as the size says.
struct SetupReq {  // struct setupReq
  int tpRank, tpLocalRank, tpRemoteRank, shared, netDev, useGdr, needFlush, channelId, connIndex, sameDevice;
};

struct SendConnectArgs {  // struct netSendConnectArgs
  char handle[128];
  int netAttr[kNetAttrs];
};

struct RecvConnectArgs {  // struct netRecvConnectArgs
  int proxyRank;
  int netAttr[kNetAttrs];
};

static_assert(sizeof(SetupReq) >= kSetupReqSize && sizeof(SendConnectArgs) >= kSendConnectSize &&
              sizeof(RecvConnectArgs) >= kRecvConnectSize);

struct TransportComm {  // struct ncclTransportComm
  using Call = Result (*)(void* connection, void* state, void* request, int request_size, void* response,
                          int response_size, int* done);
  void* setup;
  void* connect;
  void* free;
  void* proxySharedInit;
  Call proxySetup;
  Call proxyConnect;
  Result (*proxyFree)(void* connection, void* state);
  Result (*proxyProgress)(void* state, void* args);
  void* proxyRegister;
  void* proxyDeregister;
};

struct Transport {  // struct ncclTransport
  char name[8];
  void* canConnect;
  TransportComm send;
  TransportComm recv;
};

static_assert(sizeof(TransportComm) == 80 && sizeof(Transport) == 176);

}  // namespace bagua::nccl_net::real
