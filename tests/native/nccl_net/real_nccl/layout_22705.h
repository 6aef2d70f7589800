// By read_layout.py; included by layout.h.
#pragma once

#include "nccl_net/real_nccl/field.h"

namespace bagua::nccl_net::real {

constexpr size_t kSetupReqSize = 36;
constexpr size_t kSendConnectSize = 132;
constexpr size_t kRecvConnectSize = 4;
constexpr size_t kConnectMapSize = 1400;
constexpr size_t kConnFifoSize = 24;

namespace comm {  // struct ncclComm
constexpr size_t kSize = 1080320;
constexpr Field<const char**> ncclNet{26320};
constexpr Field<void*> netContext{kAbsent};
constexpr Field<uint64_t> commHash{1066160};
constexpr Field<const char*> netName{1074416};
constexpr Field<int> trafficClass{1074428};
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
constexpr size_t kSize = 33008;
constexpr Field<int> nsubs{32776};
constexpr Field<int> sliceSteps{32800};
constexpr Field<int> chunkSteps{32804};
constexpr Field<int> state{32856};
constexpr Field<int> nChannels{kAbsent};
constexpr Field<int> nPeers{kAbsent};
constexpr Field<int> idle{32960};
constexpr Field<uint8_t> collAPI{32851};
constexpr Field<uint8_t> protocol{32852};
constexpr Field<uint8_t> algorithm{32853};
}  // namespace args

namespace sub {  // struct ncclProxySubArgs
constexpr size_t kSize = 512;
constexpr Field<void*> connection{0, 512};
constexpr Field<int> channelId{72, 512};
constexpr Field<int> nsteps{76, 512};
constexpr Field<int> groupSize{112, 512};
constexpr Field<int64_t> nbytes{80, 512};
constexpr Field<uint64_t> posted{128, 512};
constexpr Field<uint64_t> received{136, 512};
}  // namespace sub

namespace send {  // struct sendNetResources
constexpr size_t kSize = 1592;
constexpr Field<void*> sendMem{1408};
constexpr Field<void*> recvMem{1416};
constexpr Field<char*> buffers{1488};
constexpr Field<int> buffSizes{1512};
}  // namespace send

namespace recv {  // struct recvNetResources
constexpr size_t kSize = 1616;
constexpr Field<void*> sendMem{1416};
constexpr Field<void*> recvMem{1424};
constexpr Field<char*> buffers{1512};
constexpr Field<int> buffSizes{1536};
}  // namespace recv

namespace fifo {  // struct ncclRecvMem
constexpr size_t kSize = 4096;
constexpr Field<int64_t> connFifo{128};
}  // namespace fifo

constexpr size_t kSizeInConnFifo = 8;  // ncclConnFifo.size

}  // namespace bagua::nccl_net::real
