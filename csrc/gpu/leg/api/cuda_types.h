// Declares the part of the binary interface of CUDA's runtime and driver that the leg uses, so that the build needs no
// CUDA headers. tests/native/leg compares it with the real headers where they are installed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace bagua::device {

using CudaError = int;
using CudaStream = void*;  // cudaStream_t, CUstream
using CudaEvent = void*;   // cudaEvent_t
using CudaHostFunction = void (*)(void*);
using DriverAddress = unsigned long long;  // CUdeviceptr
using CudaContext = void*;                 // CUcontext

constexpr CudaError kCudaOk = 0;
constexpr CudaError kCudaNotReady = 600;

enum CudaCopy : int { kHostToDevice = 1, kDeviceToHost = 2, kDeviceToDevice = 3 };
constexpr unsigned kStreamNonBlocking = 1;
constexpr unsigned kEventBlockingSync = 1, kEventDisableTiming = 2;
constexpr unsigned kHostRegisterPortable = 1, kHostRegisterMapped = 2;
constexpr int kCaptureNone = 0;        // cudaStreamCaptureStatusNone
constexpr int kCaptureRelaxed = 2;     // cudaStreamCaptureModeRelaxed
constexpr unsigned kWaitValueGeq = 0;  // CU_STREAM_WAIT_VALUE_GEQ: waits for (int32)(*address - value) >= 0

struct CudaRuntime {
  CudaError (*get_device)(int*);
  CudaError (*set_device)(int);
  CudaError (*pci_bus_id)(char*, int, int);
  CudaError (*priority_range)(int* least, int* greatest);
  CudaError (*stream_create)(CudaStream*, unsigned flags, int priority);
  CudaError (*stream_destroy)(CudaStream);
  CudaError (*stream_query)(CudaStream);
  CudaError (*stream_synchronize)(CudaStream);
  CudaError (*stream_wait_event)(CudaStream, CudaEvent, unsigned flags);
  CudaError (*stream_capturing)(CudaStream, int* status);
  CudaError (*capture_mode)(int*);
  CudaError (*event_create)(CudaEvent*, unsigned flags);
  CudaError (*event_destroy)(CudaEvent);
  CudaError (*event_record)(CudaEvent, CudaStream);
  CudaError (*event_query)(CudaEvent);
  CudaError (*event_synchronize)(CudaEvent);
  CudaError (*copy)(void* dst, const void* src, size_t bytes, int kind, CudaStream);
  CudaError (*set)(void* dst, int value, size_t bytes, CudaStream);
  CudaError (*host_function)(CudaStream, CudaHostFunction, void*);
  CudaError (*host_register)(void*, size_t, unsigned flags);
  CudaError (*host_unregister)(void*);
  CudaError (*host_address)(void** device, void* host, unsigned flags);
  CudaError (*allocate)(void**, size_t);
  CudaError (*release)(void*);
  const char* (*error_text)(CudaError);
};

struct CudaDriver {
  CudaError (*init)(unsigned flags);
  CudaError (*device)(int* handle, int ordinal);
  CudaError (*retain)(CudaContext*, int handle);
  CudaError (*release)(int handle);
  CudaError (*push)(CudaContext);
  CudaError (*pop)(CudaContext*);
  CudaError (*wait_value)(CudaStream, DriverAddress, uint32_t value, unsigned flags);
};

}  // namespace bagua::device
