// By read_layout.py; included by layout.h.
#pragma once

#include "nccl_net/real_nccl/field.h"

namespace bagua::nccl_net::real {

constexpr size_t kSetupReqSize = 36;
constexpr size_t kSendConnectSize = 128;
constexpr size_t kRecvConnectSize = 4;
constexpr size_t kConnectMapSize = 1480;
constexpr size_t kConnFifoSize = 24;

namespace comm {  // struct ncclComm
constexpr size_t kSize = 501072;
constexpr Field<const char**> ncclNet{26312};
constexpr Field<void*> netContext{kAbsent};
constexpr Field<uint64_t> commHash{492704};
constexpr Field<const char*> netName{500912};
constexpr Field<int> trafficClass{kAbsent};
}  // namespace comm

namespace proxy_state {  // struct ncclProxyState
constexpr size_t kSize = 1448;
constexpr Field<int> refCount{0};
constexpr Field<int> tpRank{4};
constexpr Field<int> tpnRanks{8};
constexpr Field<int> tpLocalnRanks{12};
constexpr Field<int> p2pnChannels{20};
constexpr Field<int> nChannels{28};
constexpr Field<int> buffSizes{32};
constexpr Field<const char**> ncclNet{48};
constexpr Field<uint32_t*> abortFlag{64};
constexpr Field<void*> netContext{kAbsent};
constexpr Field<int> netAttr{kAbsent};
}  // namespace proxy_state

namespace connection {  // struct ncclProxyConnection
constexpr size_t kSize = 120;
constexpr Field<int> send{0};
constexpr Field<int> transport{4};
constexpr Field<int> sameProcess{16};
constexpr Field<int> state{96};
constexpr Field<void*> transportResources{56};
}  // namespace connection

namespace args {  // struct ncclProxyArgs
constexpr size_t kSize = 27888;
constexpr Field<int> nsubs{27656};
constexpr Field<int> sliceSteps{27680};
constexpr Field<int> chunkSteps{27684};
constexpr Field<int> state{27736};
constexpr Field<int> nChannels{kAbsent};
constexpr Field<int> nPeers{kAbsent};
constexpr Field<int> idle{27840};
constexpr Field<uint8_t> collAPI{27731};
constexpr Field<uint8_t> protocol{27732};
constexpr Field<uint8_t> algorithm{27733};
}  // namespace args

namespace sub {  // struct ncclProxySubArgs
constexpr size_t kSize = 432;
constexpr Field<void*> connection{0, 432};
constexpr Field<int> channelId{72, 432};
constexpr Field<int> nsteps{76, 432};
constexpr Field<int> groupSize{112, 432};
constexpr Field<int64_t> nbytes{80, 432};
constexpr Field<uint64_t> posted{128, 432};
constexpr Field<uint64_t> received{136, 432};
}  // namespace sub

namespace send {  // struct sendNetResources
constexpr size_t kSize = 1672;
constexpr Field<void*> sendMem{1488};
constexpr Field<void*> recvMem{1496};
constexpr Field<char*> buffers{1568};
constexpr Field<int> buffSizes{1592};
}  // namespace send

namespace recv {  // struct recvNetResources
constexpr size_t kSize = 1696;
constexpr Field<void*> sendMem{1496};
constexpr Field<void*> recvMem{1504};
constexpr Field<char*> buffers{1592};
constexpr Field<int> buffSizes{1616};
}  // namespace recv

namespace fifo {  // struct ncclRecvMem
constexpr size_t kSize = 4096;
constexpr Field<int64_t> connFifo{128};
}  // namespace fifo

constexpr size_t kSizeInConnFifo = 8;  // ncclConnFifo.size

}  // namespace bagua::nccl_net::real
