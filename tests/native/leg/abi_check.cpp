// Compares the leg's own declarations with the real headers, at compile time: -DWITH_CUDA, -DWITH_NCCL as they exist.
#include <cstddef>
#include <type_traits>

#include "gpu/leg/api/cuda_types.h"
#include "gpu/leg/api/nccl_types.h"

using namespace bagua::device;

// Arguments are passed alike: pointers for pointers (and handles), numbers of the same size and kind for numbers.
template <class A, class B>
constexpr bool passed_alike() {
  using X = std::remove_cv_t<A>;
  using Y = std::remove_cv_t<B>;
  if constexpr (std::is_pointer_v<X> || std::is_pointer_v<Y>) return std::is_pointer_v<X> && std::is_pointer_v<Y>;
  if constexpr (std::is_class_v<X> || std::is_class_v<Y>) return sizeof(X) == sizeof(Y) && alignof(X) == alignof(Y);
  return sizeof(X) == sizeof(Y) && !std::is_floating_point_v<X> && !std::is_floating_point_v<Y>;
}

template <class Ours, class Theirs>
struct Same : std::false_type {};
template <class R, class... A, class S, class... B>
struct Same<R (*)(A...), S (*)(B...)> {
  template <bool>
  static constexpr bool all() {
    if constexpr (sizeof...(A) == sizeof...(B)) return passed_alike<R, S>() && (passed_alike<A, B>() && ...);
    return false;
  }
  static constexpr bool value = all<true>();
};
#define SAME(table, member, function) \
  static_assert(Same<decltype(table::member), decltype(&function)>::value, #function " is declared otherwise")

#ifdef WITH_CUDA
#include <cuda.h>
#include <cuda_runtime_api.h>
SAME(CudaRuntime, get_device, cudaGetDevice);
SAME(CudaRuntime, set_device, cudaSetDevice);
SAME(CudaRuntime, pci_bus_id, cudaDeviceGetPCIBusId);
SAME(CudaRuntime, priority_range, cudaDeviceGetStreamPriorityRange);
SAME(CudaRuntime, stream_create, cudaStreamCreateWithPriority);
SAME(CudaRuntime, stream_destroy, cudaStreamDestroy);
SAME(CudaRuntime, stream_query, cudaStreamQuery);
SAME(CudaRuntime, stream_synchronize, cudaStreamSynchronize);
SAME(CudaRuntime, stream_capturing, cudaStreamIsCapturing);
SAME(CudaRuntime, capture_mode, cudaThreadExchangeStreamCaptureMode);
SAME(CudaRuntime, event_destroy, cudaEventDestroy);
SAME(CudaRuntime, event_query, cudaEventQuery);
SAME(CudaRuntime, event_synchronize, cudaEventSynchronize);
SAME(CudaRuntime, copy, cudaMemcpyAsync);
SAME(CudaRuntime, set, cudaMemsetAsync);
SAME(CudaRuntime, host_function, cudaLaunchHostFunc);
SAME(CudaRuntime, host_unregister, cudaHostUnregister);
SAME(CudaRuntime, release, cudaFree);
SAME(CudaRuntime, error_text, cudaGetErrorString);
// These have overloads in C++.
static_assert(
    Same<decltype(CudaRuntime::stream_wait_event), cudaError_t (*)(cudaStream_t, cudaEvent_t, unsigned)>::value);
static_assert(Same<decltype(CudaRuntime::event_create), cudaError_t (*)(cudaEvent_t*, unsigned)>::value);
static_assert(Same<decltype(CudaRuntime::event_record), cudaError_t (*)(cudaEvent_t, cudaStream_t)>::value);
static_assert(Same<decltype(CudaRuntime::host_register), cudaError_t (*)(void*, size_t, unsigned)>::value);
static_assert(Same<decltype(CudaRuntime::host_address), cudaError_t (*)(void**, void*, unsigned)>::value);
static_assert(Same<decltype(CudaRuntime::allocate), cudaError_t (*)(void**, size_t)>::value);
SAME(CudaDriver, init, cuInit);
SAME(CudaDriver, device, cuDeviceGet);
SAME(CudaDriver, retain, cuDevicePrimaryCtxRetain);
SAME(CudaDriver, release, cuDevicePrimaryCtxRelease);
SAME(CudaDriver, push, cuCtxPushCurrent);
SAME(CudaDriver, pop, cuCtxPopCurrent);
static_assert(Same<decltype(CudaDriver::wait_value), CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned)>::value);
static_assert(cudaSuccess == kCudaOk && cudaErrorNotReady == kCudaNotReady);
static_assert(cudaMemcpyHostToDevice == kHostToDevice && cudaMemcpyDeviceToHost == kDeviceToHost &&
              cudaMemcpyDeviceToDevice == kDeviceToDevice);
static_assert(cudaStreamNonBlocking == kStreamNonBlocking && cudaEventDisableTiming == kEventDisableTiming &&
              cudaEventBlockingSync == kEventBlockingSync);
static_assert(cudaHostRegisterPortable == kHostRegisterPortable && cudaHostRegisterMapped == kHostRegisterMapped);
static_assert(cudaStreamCaptureStatusNone == kCaptureNone && cudaStreamCaptureModeRelaxed == kCaptureRelaxed);
static_assert(static_cast<unsigned>(CU_STREAM_WAIT_VALUE_GEQ) == kWaitValueGeq);
static_assert(sizeof(CUdeviceptr) == sizeof(DriverAddress));
#endif

#ifdef WITH_NCCL
#include <nccl.h>
SAME(Nccl, version, ncclGetVersion);
SAME(Nccl, unique_id, ncclGetUniqueId);
SAME(Nccl, init_rank, ncclCommInitRankConfig);
SAME(Nccl, finalize, ncclCommFinalize);
SAME(Nccl, last_error, ncclGetLastError);
SAME(Nccl, destroy, ncclCommDestroy);
SAME(Nccl, abort, ncclCommAbort);
SAME(Nccl, async_error, ncclCommGetAsyncError);
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 18, 0)
SAME(Nccl, split, ncclCommSplit);
#endif
SAME(Nccl, error_text, ncclGetErrorString);
SAME(Nccl, group_start, ncclGroupStart);
SAME(Nccl, group_end, ncclGroupEnd);
SAME(Nccl, all_reduce, ncclAllReduce);
SAME(Nccl, reduce, ncclReduce);
SAME(Nccl, broadcast, ncclBroadcast);
SAME(Nccl, all_gather, ncclAllGather);
SAME(Nccl, reduce_scatter, ncclReduceScatter);
SAME(Nccl, send, ncclSend);
SAME(Nccl, recv, ncclRecv);
static_assert(sizeof(NcclId) == NCCL_UNIQUE_ID_BYTES && alignof(NcclId) == alignof(ncclUniqueId));
constexpr ncclConfig_t kConfig = NCCL_CONFIG_INITIALIZER;
static_assert(kConfig.magic == NcclConfig{}.magic && kConfig.cgaClusterSize == NcclConfig{}.cluster &&
              NcclConfig{}.version == NCCL_VERSION(2, 14, 0) && sizeof(NcclConfig) <= sizeof(ncclConfig_t));
static_assert(offsetof(ncclConfig_t, size) == offsetof(NcclConfig, size) &&
              offsetof(ncclConfig_t, magic) == offsetof(NcclConfig, magic) &&
              offsetof(ncclConfig_t, version) == offsetof(NcclConfig, version) &&
              offsetof(ncclConfig_t, blocking) == offsetof(NcclConfig, blocking) &&
              offsetof(ncclConfig_t, cgaClusterSize) == offsetof(NcclConfig, cluster));
static_assert(ncclSuccess == kNcclOk && ncclInProgress == kNcclInProgress);
static_assert(ncclInt8 == kNcclInt8 && ncclUint8 == kNcclUint8 && ncclInt32 == kNcclInt32 && ncclInt64 == kNcclInt64);
static_assert(ncclFloat16 == kNcclFloat16 && ncclFloat32 == kNcclFloat32 && ncclFloat64 == kNcclFloat64 &&
              ncclBfloat16 == kNcclBfloat16);
static_assert(ncclSum == kNcclSum && ncclProd == kNcclProd && ncclMax == kNcclMax && ncclMin == kNcclMin &&
              ncclAvg == kNcclAvg);
#endif

int main() {
  return 0;
}
