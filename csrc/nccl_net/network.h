// The plugin's functions, in the form of version 11 of the interface; the tables of other versions call them
// (tables.cpp). They throw no exceptions and never wait for a peer.
#pragma once

#include "nccl_net/nccl_net_abi.h"

namespace bagua::nccl_net {

extern const char kPluginName[];

Result init(void** context, uint64_t comm_id, CommConfig* config, Logger logger, ProfilerCallback profiler);
Result devices(int* count);
Result get_properties(int device, PropertiesV11* properties);
Result listen(void* context, int device, void* handle, void** listen_comm);
Result connect(void* context, int device, void* handle, void** send_comm, DeviceHandle** offload);
Result accept(void* listen_comm, void** recv_comm, DeviceHandle** offload);
Result reg_mr(void* comm, void* data, size_t size, int type, void** mhandle);
Result reg_mr_dma_buf(void* comm, void* data, size_t size, int type, uint64_t offset, int fd, void** mhandle);
Result dereg_mr(void* comm, void* mhandle);
Result isend(void* send_comm, void* data, size_t size, int tag, void* mhandle, void* profiler, void** request);
Result irecv(void* recv_comm, int n, void** data, size_t* sizes, int* tags, void** mhandles, void** profilers,
             void** request);
Result iflush(void* recv_comm, int n, void** data, int* sizes, void** mhandles, void** request);
Result test(void* request, int* done, int* sizes);
Result close_send(void* comm);
Result close_recv(void* comm);
Result close_listen(void* comm);
Result finalize(void* context);
Result set_net_attributes(void* context, NetAttributes* attributes);

}  // namespace bagua::nccl_net
