// The tables of functions that NCCL looks up: version 11, and thin adapters for the other versions.
#include "nccl_net/network.h"

namespace bagua::nccl_net {
namespace {

// Versions before 11 have no context.
Result init_v8(Logger logger) {
  void* context = nullptr;
  return init(&context, 0, nullptr, logger, nullptr);
}

Result init_v10(Logger logger, ProfilerCallback profiler) {
  void* context = nullptr;
  return init(&context, 0, nullptr, logger, profiler);
}

// Copies the fields that two versions of the properties have in common.
template <class To>
void copy_common(const PropertiesV11& from, To* to) {
  to->name = from.name;
  to->pci_path = from.pci_path;
  to->guid = from.guid;
  to->ptr_support = from.ptr_support;
  to->reg_is_global = from.reg_is_global;
  to->speed = from.speed;
  to->port = from.port;
  to->latency = from.latency;
  to->max_comms = from.max_comms;
  to->max_recvs = from.max_recvs;
  to->net_device_type = from.net_device_type;
  to->net_device_version = from.net_device_version;
}

Result get_properties_v8(int device, PropertiesV8* properties) {
  PropertiesV11 all{};
  if (properties == nullptr) return kInvalidArgument;
  if (const Result result = get_properties(device, &all); result != kSuccess) return result;
  *properties = {};
  copy_common(all, properties);
  return kSuccess;
}

Result get_properties_v9(int device, PropertiesV9* properties) {
  PropertiesV11 all{};
  if (properties == nullptr) return kInvalidArgument;
  if (const Result result = get_properties(device, &all); result != kSuccess) return result;
  *properties = all;  // version 11 begins with this part
  return kSuccess;
}

Result get_properties_v12(int device, PropertiesV12* properties) {
  PropertiesV11 all{};
  if (properties == nullptr) return kInvalidArgument;
  if (const Result result = get_properties(device, &all); result != kSuccess) return result;
  *properties = {};
  copy_common(all, properties);
  properties->force_flush = all.force_flush;
  properties->virtual_device.count = all.virtual_device.count;
  for (int i = 0; i < all.virtual_device.count; ++i) {
    properties->virtual_device.devices[i] = all.virtual_device.devices[i];
  }
  properties->max_p2p_bytes = all.max_p2p_bytes;
  properties->max_collective_bytes = all.max_collective_bytes;
  properties->max_multi_request_size = all.max_multi_request_size;
  properties->rail_id = -1;  // unknown, as is the plane
  properties->plane_id = -1;
  return kSuccess;
}

Result listen_v8(int device, void* handle, void** listen_comm) {
  return listen(nullptr, device, handle, listen_comm);
}

Result connect_v8(int device, void* handle, void** send_comm, DeviceHandle** offload) {
  return connect(nullptr, device, handle, send_comm, offload);
}

Result connect_v10(int device, CommConfig*, void* handle, void** send_comm, DeviceHandle** offload) {
  return connect(nullptr, device, handle, send_comm, offload);
}

Result isend_v8(void* send_comm, void* data, int size, int tag, void* mhandle, void** request) {
  if (size < 0) return kInvalidArgument;
  return isend(send_comm, data, static_cast<size_t>(size), tag, mhandle, nullptr, request);
}

Result isend_v9(void* send_comm, void* data, size_t size, int tag, void* mhandle, void** request) {
  return isend(send_comm, data, size, tag, mhandle, nullptr, request);
}

Result irecv_v8(void* recv_comm, int n, void** data, int* sizes, int* tags, void** mhandles, void** request) {
  if (n != 1 || sizes == nullptr || sizes[0] < 0) return kInvalidArgument;
  size_t wide = static_cast<size_t>(sizes[0]);
  return irecv(recv_comm, n, data, &wide, tags, mhandles, nullptr, request);
}

Result irecv_v9(void* recv_comm, int n, void** data, size_t* sizes, int* tags, void** mhandles, void** request) {
  return irecv(recv_comm, n, data, sizes, tags, mhandles, nullptr, request);
}

}  // namespace
}  // namespace bagua::nccl_net

#define BAGUA_NET_EXPORT __attribute__((visibility("default")))
#define BAGUA_NET_COMMON_MIDDLE accept, reg_mr, reg_mr_dma_buf, dereg_mr
#define BAGUA_NET_COMMON_END iflush, test, close_send, close_recv, close_listen, nullptr, nullptr

// getDeviceMr, irecvConsumed and makeVDevice are NULL: there is no offload to the GPU, and interfaces are not merged.
using namespace bagua::nccl_net;
extern "C" {
BAGUA_NET_EXPORT NetV8 ncclNetPlugin_v8{kPluginName,
                                        init_v8,
                                        devices,
                                        get_properties_v8,
                                        listen_v8,
                                        connect_v8,
                                        BAGUA_NET_COMMON_MIDDLE,
                                        isend_v8,
                                        irecv_v8,
                                        BAGUA_NET_COMMON_END};
BAGUA_NET_EXPORT NetV9 ncclNetPlugin_v9{kPluginName,
                                        init_v8,
                                        devices,
                                        get_properties_v9,
                                        listen_v8,
                                        connect_v8,
                                        BAGUA_NET_COMMON_MIDDLE,
                                        isend_v9,
                                        irecv_v9,
                                        BAGUA_NET_COMMON_END,
                                        nullptr};
BAGUA_NET_EXPORT NetV10 ncclNetPlugin_v10{kPluginName,
                                          init_v10,
                                          devices,
                                          get_properties_v9,
                                          listen_v8,
                                          connect_v10,
                                          BAGUA_NET_COMMON_MIDDLE,
                                          isend,
                                          irecv,
                                          BAGUA_NET_COMMON_END,
                                          nullptr};
BAGUA_NET_EXPORT NetV11 ncclNetPlugin_v11{
    kPluginName,          init,    devices,  get_properties,    listen, connect, BAGUA_NET_COMMON_MIDDLE, isend, irecv,
    BAGUA_NET_COMMON_END, nullptr, finalize, set_net_attributes};
BAGUA_NET_EXPORT NetV12 ncclNetPlugin_v12{
    kPluginName,          init,    devices,  get_properties_v12, listen, connect, BAGUA_NET_COMMON_MIDDLE, isend, irecv,
    BAGUA_NET_COMMON_END, nullptr, finalize, set_net_attributes};
}
