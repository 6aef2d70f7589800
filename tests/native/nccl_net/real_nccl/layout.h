// Where things lie in NCCL as NVIDIA built it for x86-64 (wheels nvidia-nccl-cu12 and -cu13). The offsets are true of
// single binaries, which BAGUA_REAL_NCCL chooses from: the version as ncclGetVersion says it. Names are NCCL's. What is
// not here stays zero.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace bagua::nccl_net::real {

constexpr size_t kAbsent = SIZE_MAX;  // this version does not have the field

// Lies at `offset` in a struct of which nothing else is known; of an array, the element `index`.
template <class T>
struct Field {
  size_t offset;
  size_t stride = sizeof(T);

  T& operator()(void* object, size_t index = 0) const {
    return *reinterpret_cast<T*>(static_cast<char*>(object) + offset + index * stride);
  }
  // Where the version has it.
  void set(void* object, T value, size_t index = 0) const {
    if (offset != kAbsent) (*this)(object, index) = value;
  }
};

// Of 2.21.5, 2.25.1, 2.27.5, 2.28.9, 2.32.3, by their debugging information: gdb -batch -ex "list
// 'transport/net.cc':600" -ex "ptype /o struct ncclProxyArgs" libnccl.so.2
constexpr size_t pick(size_t v2_21, size_t v2_25, size_t v2_27, size_t v2_28, size_t v2_32) {
  switch (BAGUA_REAL_NCCL) {
    case 22105:
      return v2_21;
    case 22501:
      return v2_25;
    case 22705:
      return v2_27;
    case 22809:
      return v2_28;
    case 23203:
      return v2_32;
  }
  throw "BAGUA_REAL_NCCL is a version whose layout is not known";
}
using BufferSize = std::conditional_t<BAGUA_REAL_NCCL == 23203, int64_t, int>;

constexpr size_t kSetupReqSize = pick(36, 36, 36, 36, 40);
constexpr size_t kSendConnectSize = pick(128, 128, 132, 172, 172);
constexpr size_t kRecvConnectSize = pick(4, 4, 4, 48, 48);
constexpr size_t kConnectMapSize = pick(21040, 1480, 1400, 1400, 1400);
constexpr size_t kConnFifoSize = pick(24, 24, 24, 24, 32);

namespace comm {  // struct ncclComm
constexpr size_t kSize = pick(16288, 501072, 1080320, 1082968, 1196536);
constexpr Field<const char**> ncclNet{pick(13480, 26312, 26320, 26320, 26848)};
constexpr Field<void*> netContext{pick(kAbsent, kAbsent, kAbsent, 26328, 26856)};
constexpr Field<uint64_t> commHash{pick(13528, 492704, 1066160, 1066184, 1181408)};
constexpr Field<const char*> netName{pick(15688, 500912, 1074416, 1075624, 1193656)};
constexpr Field<int> trafficClass{pick(kAbsent, kAbsent, 1074428, 1075636, 1193668)};
}  // namespace comm

namespace proxy_state {  // struct ncclProxyState
constexpr size_t kSize = pick(1432, 1448, 1448, 1520, 1544);
constexpr Field<int> refCount{pick(0, 0, 0, 0, 0)};
constexpr Field<int> tpRank{pick(4, 4, 4, 4, 16)};
constexpr Field<int> tpnRanks{pick(8, 8, 8, 8, 20)};
constexpr Field<int> tpLocalnRanks{pick(12, 12, 12, 12, 24)};
constexpr Field<int> p2pnChannels{pick(20, 20, 20, 20, 32)};
constexpr Field<int> nChannels{pick(28, 28, 28, 28, 40)};
constexpr Field<int> buffSizes{pick(32, 32, 32, 32, 44)};
constexpr Field<const char**> ncclNet{pick(48, 48, 48, 48, 64)};
constexpr Field<uint32_t*> abortFlag{pick(64, 64, 64, 72, 88)};
constexpr Field<void*> netContext{pick(kAbsent, kAbsent, kAbsent, 1440, 1464)};
constexpr Field<int> netAttr{pick(kAbsent, kAbsent, kAbsent, 1448, 1472)};
}  // namespace proxy_state

namespace connection {  // struct ncclProxyConnection
constexpr size_t kSize = pick(120, 120, 120, 120, 152);
constexpr Field<int> send{pick(0, 0, 0, 0, 0)};
constexpr Field<int> transport{pick(4, 4, 4, 4, 4)};
constexpr Field<int> sameProcess{pick(16, 16, 16, 16, 16)};
constexpr Field<int> state{pick(96, 96, 96, 96, 104)};
constexpr Field<void*> transportResources{pick(56, 56, 56, 56, 64)};
}  // namespace connection

namespace args {  // struct ncclProxyArgs
constexpr size_t kSize = pick(11240, 27888, 33008, 33016, 33016);
constexpr Field<int> nsubs{pick(11016, 27656, 32776, 32776, 32776)};
constexpr Field<int> sliceSteps{pick(11032, 27680, 32800, 32800, 32800)};
constexpr Field<int> chunkSteps{pick(11036, 27684, 32804, 32804, 32804)};
constexpr Field<int> state{pick(11088, 27736, 32856, 32856, 32856)};
constexpr Field<int> nChannels{pick(kAbsent, kAbsent, kAbsent, 32960, 32960)};
constexpr Field<int> nPeers{pick(kAbsent, kAbsent, kAbsent, 32964, 32964)};
constexpr Field<int> idle{pick(11192, 27840, 32960, 32968, 32968)};
constexpr Field<uint8_t> collAPI{pick(11083, 27731, 32851, 32852, 32852)};
constexpr Field<uint8_t> protocol{pick(11084, 27732, 32852, 32853, 32853)};
constexpr Field<uint8_t> algorithm{pick(kAbsent, 27733, 32853, 32854, 32854)};
}  // namespace args

namespace sub {  // struct ncclProxySubArgs
constexpr size_t kSize = pick(344, 432, 512, 512, 512);
constexpr Field<void*> connection{pick(0, 0, 0, 0, 0), kSize};
constexpr Field<int> channelId{pick(64, 72, 72, 72, 72), kSize};
constexpr Field<int> nsteps{pick(68, 76, 76, 76, 76), kSize};
constexpr Field<int> groupSize{pick(84, 112, 112, 112, 112), kSize};
constexpr Field<int64_t> nbytes{pick(72, 80, 80, 80, 80), kSize};
}  // namespace sub

namespace send {  // struct sendNetResources
constexpr size_t kSize = pick(21224, 1672, 1592, 1592, 1600);
constexpr Field<void*> sendMem{pick(21048, 1488, 1408, 1408, 1408)};
constexpr Field<void*> recvMem{pick(21056, 1496, 1416, 1416, 1416)};
constexpr Field<char*> buffers{pick(21128, 1568, 1488, 1488, 1488)};
constexpr Field<BufferSize> buffSizes{pick(21152, 1592, 1512, 1512, 1512)};
}  // namespace send

namespace recv {  // struct recvNetResources
constexpr size_t kSize = pick(21248, 1696, 1616, 1616, 1624);
constexpr Field<void*> sendMem{pick(21056, 1496, 1416, 1416, 1416)};
constexpr Field<void*> recvMem{pick(21064, 1504, 1424, 1424, 1424)};
constexpr Field<char*> buffers{pick(21152, 1592, 1512, 1512, 1512)};
constexpr Field<BufferSize> buffSizes{pick(21176, 1616, 1536, 1536, 1536)};
}  // namespace recv

namespace fifo {  // struct ncclRecvMem
constexpr size_t kSize = pick(4096, 4096, 4096, 4096, 4096);
constexpr Field<int64_t> connFifo{pick(128, 128, 128, 128, 128)};
}  // namespace fifo
constexpr size_t kSizeInConnFifo = pick(8, 8, 8, 8, 16);

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
