// By read_layout.py; included by layout.h.
#pragma once

#include "nccl_net/real_nccl/field.h"

namespace bagua::nccl_net::real {

constexpr size_t kSetupReqSize = 36;
constexpr size_t kSendConnectSize = 128;
constexpr size_t kRecvConnectSize = 4;
constexpr size_t kConnectMapSize = 21040;
constexpr size_t kConnFifoSize = 24;

namespace comm {  // struct ncclComm
constexpr size_t kSize = 16288;
constexpr Field<const char**> ncclNet{13480};
constexpr Field<void*> netContext{kAbsent};
constexpr Field<uint64_t> commHash{13528};
constexpr Field<const char*> netName{15688};
constexpr Field<int> trafficClass{kAbsent};
}  // namespace comm

namespace proxy_state {  // struct ncclProxyState
constexpr size_t kSize = 1432;
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
constexpr size_t kSize = 11240;
constexpr Field<int> nsubs{11016};
constexpr Field<int> sliceSteps{11032};
constexpr Field<int> chunkSteps{11036};
constexpr Field<int> state{11088};
constexpr Field<int> nChannels{kAbsent};
constexpr Field<int> nPeers{kAbsent};
constexpr Field<int> idle{11192};
constexpr Field<uint8_t> collAPI{11083};
constexpr Field<uint8_t> protocol{11084};
constexpr Field<uint8_t> algorithm{kAbsent};
}  // namespace args

namespace sub {  // struct ncclProxySubArgs
constexpr size_t kSize = 344;
constexpr Field<void*> connection{0, 344};
constexpr Field<int> channelId{64, 344};
constexpr Field<int> nsteps{68, 344};
constexpr Field<int> groupSize{84, 344};
constexpr Field<int64_t> nbytes{72, 344};
constexpr Field<uint64_t> posted{96, 344};
constexpr Field<uint64_t> received{104, 344};
}  // namespace sub

namespace send {  // struct sendNetResources
constexpr size_t kSize = 21224;
constexpr Field<void*> sendMem{21048};
constexpr Field<void*> recvMem{21056};
constexpr Field<char*> buffers{21128};
constexpr Field<int> buffSizes{21152};
}  // namespace send

namespace recv {  // struct recvNetResources
constexpr size_t kSize = 21248;
constexpr Field<void*> sendMem{21056};
constexpr Field<void*> recvMem{21064};
constexpr Field<char*> buffers{21152};
constexpr Field<int> buffSizes{21176};
}  // namespace recv

namespace fifo {  // struct ncclRecvMem
constexpr size_t kSize = 4096;
constexpr Field<int64_t> connFifo{128};
}  // namespace fifo

constexpr size_t kSizeInConnFifo = 8;  // ncclConnFifo.size

}  // namespace bagua::nccl_net::real
