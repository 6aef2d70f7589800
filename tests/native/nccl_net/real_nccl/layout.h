// Where things lie in NCCL 2.28.9, as NVIDIA built it for x86-64 (wheel nvidia-nccl-cu13): true of that one binary, and
// read off its own debugging information: gdb -batch -ex "ptype /o struct ncclProxyArgs" libnccl.so.2 Names are NCCL's.
// What is not here stays zero.
#pragma once

#include <cstddef>
#include <cstdint>

namespace bagua::nccl_net::real {

constexpr int kVersion = 22809;  // what ncclGetVersion says

// A field of a struct of which nothing else is known; of an array, the element `index`.
template <class T>
struct Field {
  size_t offset;
  size_t stride = sizeof(T);

  T& operator()(void* object, size_t index = 0) const {
    return *reinterpret_cast<T*>(static_cast<char*>(object) + offset + index * stride);
  }
};

using Result = int;                  // ncclResult_t
constexpr Result kInProgress = 7;    // ncclInProgress
constexpr int kSteps = 8;            // NCCL_STEPS: parts of a buffer
constexpr int kLl = 0, kSimple = 2;  // protocols; 1 is LL128
constexpr int kProtocols = 3;

// Sizes of the buffers that NCCL gives a connection by default.
constexpr int kBufferSizes[kProtocols] = {512 << 10, 4800 << 10, 4 << 20};

namespace comm {  // struct ncclComm
constexpr size_t kSize = 1082968;
constexpr Field<const char**> ncclNet{26320};  // ncclNet_t*, whose first field is the name
constexpr Field<void*> netContext{26328};
constexpr Field<int> ncclNetVer{26348};
constexpr Field<uint64_t> commHash{1066184};
constexpr size_t config = 1075592;  // ncclConfig_t
constexpr Field<const char*> netName{config + 32};
constexpr Field<int> trafficClass{config + 44};
}  // namespace comm

namespace proxy_state {  // struct ncclProxyState
constexpr size_t kSize = 1520;
constexpr Field<int> refCount{0};
constexpr Field<int> tpRank{4};
constexpr Field<int> tpnRanks{8};
constexpr Field<int> tpLocalnRanks{12};
constexpr Field<int> p2pnChannels{20};
constexpr Field<int> nChannels{28};
constexpr Field<int> buffSizes{32};
constexpr Field<const char**> ncclNet{48};
constexpr Field<uint32_t*> abortFlag{72};
constexpr Field<void*> netContext{1440};
constexpr Field<int> netAttr{1448};  // ncclNetAttr_t: eleven numbers
}  // namespace proxy_state

constexpr int kNetAttrs = 11;
constexpr int kUndefined = -1;  // NCCL_NET_ATTR_UNDEF

namespace connection {  // struct ncclProxyConnection
constexpr size_t kSize = 120;
constexpr Field<int> send{0};
constexpr Field<int> transport{4};
constexpr Field<int> sameProcess{16};
constexpr Field<void*> transportResources{56};
constexpr Field<int> state{96};
constexpr int kTransportNet = 2;
constexpr int kConnConnected = 4;
}  // namespace connection

// struct sendNetResources and struct recvNetResources.
struct Resources {
  Field<void*> sendMem;
  Field<void*> recvMem;
  Field<char*> buffers;  // by protocol
  Field<int> buffSizes;  // by protocol
};
constexpr Resources kSendResources{{1408}, {1416}, {1488}, {1512}};
constexpr Resources kRecvResources{{1416}, {1424}, {1512}, {1536}};

// What the GPU and the proxy tell each other: struct ncclSendMem and struct ncclRecvMem.
constexpr Field<uint64_t> kHead{0};               // ncclSendMem.head: steps that are free again
constexpr Field<uint64_t> kTail{0};               // ncclRecvMem.tail: steps that are full
constexpr Field<int64_t> kFifoSize{128 + 8, 24};  // ncclRecvMem.connFifo[].size

namespace args {  // struct ncclProxyArgs
constexpr size_t kSize = 33016;
constexpr Field<int> nsubs{32776};
constexpr Field<int> sliceSteps{32800};
constexpr Field<int> chunkSteps{32804};
constexpr Field<uint8_t> collAPI{32852};
constexpr Field<uint8_t> protocol{32853};
constexpr Field<uint8_t> algorithm{32854};
constexpr Field<int> state{32856};
constexpr Field<int> nChannels{32960};
constexpr Field<int> nPeers{32964};
constexpr Field<int> idle{32968};
constexpr uint8_t kAllReduce = 4, kRing = 1;
constexpr int kOpNone = 0, kOpReady = 1;
}  // namespace args

namespace sub {  // struct ncclProxySubArgs: args.subs[], at the beginning of args
constexpr size_t kSize = 512;
constexpr Field<void*> connection{0, kSize};
constexpr Field<int> channelId{72, kSize};
constexpr Field<int> nsteps{76, kSize};
constexpr Field<int64_t> nbytes{80, kSize};
constexpr Field<int> groupSize{112, kSize};
constexpr Field<uint64_t> posted{128, kSize};
constexpr Field<uint64_t> received{136, kSize};
}  // namespace sub

struct SetupReq {  // struct setupReq
  int tpRank, tpLocalRank, tpRemoteRank, shared, netDev, useGdr, needFlush, channelId, connIndex;
};

struct SendConnectArgs {  // struct netSendConnectArgs
  char handle[128];
  int netAttr[kNetAttrs];
};

struct RecvConnectArgs {  // struct netRecvConnectArgs
  int proxyRank;
  int netAttr[kNetAttrs];
};

constexpr size_t kConnectMapSize = 1400;  // struct connectMap: the answer to proxyConnect

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

static_assert(sizeof(SetupReq) == 36 && sizeof(SendConnectArgs) == 172 && sizeof(RecvConnectArgs) == 48);
static_assert(sizeof(TransportComm) == 80 && sizeof(Transport) == 176);

}  // namespace bagua::nccl_net::real
