// Declares the binary interface between NCCL and a network plugin, versions 8 and 11, from its public description, so
// that the build needs no headers of NCCL or CUDA. Layouts, enumerators and the order of functions are NCCL's; names
// and comments are ours. The static_asserts compare sizes with those in NCCL's headers. NCCL adapts the versions
// between and above by itself.
#pragma once

#include <cstddef>
#include <cstdint>

namespace bagua::nccl_net {

enum Result : int {  // ncclResult_t
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
};

enum LogLevel : int { kLogNone = 0, kLogVersion = 1, kLogWarn = 2, kLogInfo = 3, kLogAbort = 4, kLogTrace = 5 };
constexpr unsigned long kSubsysInit = 1;
constexpr unsigned long kSubsysNet = 16;
using Logger = void (*)(LogLevel level, unsigned long subsystems, const char* file, int line, const char* format, ...);
using ProfilerCallback = Result (*)(void** event, int type, void* parent, int64_t plugin, void* data);

constexpr size_t kHandleBytes = 128;  // size of the handle that listen() writes and connect() reads
constexpr int kMaxRequests = 32;      // requests that NCCL keeps in flight on one connection
constexpr int kPtrHost = 1;           // kinds of memory
constexpr int kPtrCuda = 2;
constexpr int kPtrDmaBuf = 4;
constexpr int kDeviceHost = 0;  // ncclNetDeviceType: no offload to the GPU
constexpr size_t kMaxMessageBytes = size_t{1} << 40;

struct DeviceHandle;  // for offload to the GPU, which this plugin does not support

struct VirtualDevice {
  int count;
  int devices[4];
};

struct CommConfig {
  int traffic_class;
};

struct PropertiesV8 {
  char* name;
  char* pci_path;
  uint64_t guid;
  int ptr_support;
  int reg_is_global;
  int speed;  // Mbit/s
  int port;
  float latency;
  int max_comms;
  int max_recvs;
  int net_device_type;
  int net_device_version;
};
static_assert(sizeof(PropertiesV8) == 64);

struct PropertiesV11 {
  char* name;
  char* pci_path;
  uint64_t guid;
  int ptr_support;
  int reg_is_global;
  int force_flush;
  int speed;  // Mbit/s
  int port;
  float latency;
  int max_comms;
  int max_recvs;
  int net_device_type;
  int net_device_version;
  VirtualDevice virtual_device;
  size_t max_p2p_bytes;
  size_t max_collective_bytes;
  int max_multi_request_size;
};
static_assert(sizeof(PropertiesV11) == 112 && offsetof(PropertiesV11, max_p2p_bytes) == 88);

struct CommAttributes {
  int32_t max_concurrent_peers;
  int32_t min_concurrent_peers;
  int32_t max_flows_per_peer;
  int32_t min_flows_per_peer;
};
struct NetAttributes {
  CommAttributes send;
  CommAttributes recv;
  uint32_t op;
  uint32_t algorithm;
  uint32_t protocol;
};
static_assert(sizeof(NetAttributes) == 44);

// Functions that are the same in both versions.
using DevicesFn = Result (*)(int* count);
using AcceptFn = Result (*)(void* listen_comm, void** recv_comm, DeviceHandle** offload);
using RegMrFn = Result (*)(void* comm, void* data, size_t size, int type, void** mhandle);
using RegMrDmaBufFn = Result (*)(void* comm, void* data, size_t size, int type, uint64_t offset, int fd,
                                 void** mhandle);
using DeregMrFn = Result (*)(void* comm, void* mhandle);
using IflushFn = Result (*)(void* recv_comm, int n, void** data, int* sizes, void** mhandles, void** request);
using TestFn = Result (*)(void* request, int* done, int* sizes);
using CloseFn = Result (*)(void* comm);
using GetDeviceMrFn = Result (*)(void* comm, void* mhandle, void** device_mhandle);
using IrecvConsumedFn = Result (*)(void* recv_comm, int n, void* request);

struct NetV8 {
  const char* name;
  Result (*init)(Logger logger);
  DevicesFn devices;
  Result (*get_properties)(int device, PropertiesV8* properties);
  Result (*listen)(int device, void* handle, void** listen_comm);
  Result (*connect)(int device, void* handle, void** send_comm, DeviceHandle** offload);
  AcceptFn accept;
  RegMrFn reg_mr;
  RegMrDmaBufFn reg_mr_dma_buf;
  DeregMrFn dereg_mr;
  Result (*isend)(void* send_comm, void* data, int size, int tag, void* mhandle, void** request);
  Result (*irecv)(void* recv_comm, int n, void** data, int* sizes, int* tags, void** mhandles, void** request);
  IflushFn iflush;
  TestFn test;
  CloseFn close_send;
  CloseFn close_recv;
  CloseFn close_listen;
  GetDeviceMrFn get_device_mr;
  IrecvConsumedFn irecv_consumed;
};
static_assert(sizeof(NetV8) == 152);

struct NetV11 {
  const char* name;
  Result (*init)(void** context, uint64_t comm_id, CommConfig* config, Logger logger, ProfilerCallback profiler);
  DevicesFn devices;
  Result (*get_properties)(int device, PropertiesV11* properties);
  Result (*listen)(void* context, int device, void* handle, void** listen_comm);
  Result (*connect)(void* context, int device, void* handle, void** send_comm, DeviceHandle** offload);
  AcceptFn accept;
  RegMrFn reg_mr;
  RegMrDmaBufFn reg_mr_dma_buf;
  DeregMrFn dereg_mr;
  Result (*isend)(void* send_comm, void* data, size_t size, int tag, void* mhandle, void* profiler, void** request);
  Result (*irecv)(void* recv_comm, int n, void** data, size_t* sizes, int* tags, void** mhandles, void** profilers,
                  void** request);
  IflushFn iflush;
  TestFn test;
  CloseFn close_send;
  CloseFn close_recv;
  CloseFn close_listen;
  GetDeviceMrFn get_device_mr;
  IrecvConsumedFn irecv_consumed;
  Result (*make_v_device)(int* device, VirtualDevice* members);
  Result (*finalize)(void* context);
  Result (*set_net_attributes)(void* context, NetAttributes* attributes);
};
static_assert(sizeof(NetV11) == 176);

}  // namespace bagua::nccl_net

// The tables that NCCL looks up by name.
extern "C" {
extern bagua::nccl_net::NetV8 ncclNetPlugin_v8;
extern bagua::nccl_net::NetV11 ncclNetPlugin_v11;
}
