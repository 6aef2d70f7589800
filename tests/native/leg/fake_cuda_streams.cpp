// Devices, streams, events, and what a stream does beside copies.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <utility>

#include "fake_cuda.h"
#include "fake_cuda_world.h"

using namespace fake_cuda;

namespace {

void write_bus_id(char* out, int length, int device) {
  const char* const given = getenv("FAKE_CUDA_BUS_ID");
  snprintf(out, static_cast<size_t>(length), "%s", given != nullptr ? given : "0000:00:00.0");
  if (given == nullptr && length > 7) out[6] = static_cast<char>('0' + device % 10);
}

// One thread for all host functions of the process, as CUDA is free to do.
void serve_host() {
  this_thread().in_host_function = true;
  World& w = world();
  std::unique_lock<std::mutex> lock(w.host_mutex);
  for (;;) {
    w.host_changed.wait(lock, [&w] { return !w.host_queue.empty(); });
    auto work = std::move(w.host_queue.front());
    w.host_queue.pop_front();
    lock.unlock();
    work();
    lock.lock();
  }
}

void run_on_host(void (*function)(void*), void* context) {
  World& w = world();
  if (w.broken != 0) return;  // CUDA calls none after an error
  std::mutex mutex;
  std::condition_variable over;
  bool done = false;
  {
    std::lock_guard<std::mutex> lock(w.host_mutex);
    if (!w.host_started) std::thread(serve_host).detach();
    w.host_started = true;
    w.host_queue.emplace_back([&] {
      function(context);
      std::lock_guard<std::mutex> inner(mutex);
      done = true;
      over.notify_all();
    });
    w.host_changed.notify_all();
  }
  std::unique_lock<std::mutex> lock(mutex);
  over.wait(lock, [&] { return done; });
}

}  // namespace

FAKE int cudaGetDevice(int* device) {
  *device = this_thread().current_device;
  return entered("cudaGetDevice");
}
FAKE int cudaSetDevice(int device) {
  this_thread().current_device = device;
  return used("cudaSetDevice");
}
FAKE int cudaDeviceGetPCIBusId(char* out, int length, int device) {
  write_bus_id(out, length, device);
  return entered("cudaDeviceGetPCIBusId");
}
FAKE void fake_cuda_here(int* device, char* bus_id, int length) {
  *device = this_thread().current_device;
  write_bus_id(bus_id, length, *device);
}
FAKE int cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return entered("cudaDeviceGetStreamPriorityRange");
}
FAKE int cudaStreamCreateWithPriority(void** out, unsigned flags, int priority) {
  if (const int code = used("cudaStreamCreateWithPriority")) return code;
  if (flags != 1) misuse("a stream that waits for the default stream");
  if (priority > 0 || priority < -5) misuse("a priority that the device does not have");
  Stream* const made = new Stream;
  *out = made;
  made->device = this_thread().current_device;
  made->shares = getenv("FAKE_CUDA_ONE_QUEUE") != nullptr && priority != 0;
  std::lock_guard<std::mutex> lock(world().mutex);
  world().streams.insert(made);
  if (made->shares) {
    Queue*& queue = world().shared[priority];
    if (queue == nullptr) queue = start_queue();
    made->queue = queue;
  } else {
    made->queue = start_queue();
  }
  return kOk;
}
FAKE int cudaStreamDestroy(void* handle) {
  unsafe("cudaStreamDestroy");
  Stream* const stream = stream_of(handle, "cudaStreamDestroy");
  if (stream == nullptr) return kBadHandle;
  {
    std::lock_guard<std::mutex> lock(world().mutex);
    world().streams.erase(handle);
  }
  if (stream->shares) return kOk;
  std::lock_guard<std::mutex> lock(stream->queue->mutex);
  stream->queue->ended = true;
  stream->queue->changed.notify_all();
  return kOk;
}
FAKE int cudaStreamQuery(void* handle) {
  if (const int code = unsafe("cudaStreamQuery")) return code;
  Stream* const stream = stream_of(handle, "cudaStreamQuery");
  if (stream == nullptr) return kBadHandle;
  std::lock_guard<std::mutex> lock(stream->mutex);
  return stream->done == stream->pushed ? kOk : kNotReady;
}
FAKE int cudaStreamSynchronize(void* handle) {
  if (const int code = unsafe("cudaStreamSynchronize")) return code;
  synchronised();
  fake_cuda_drain(handle);
  return kOk;
}
FAKE int cudaStreamIsCapturing(void* handle, int* status) {
  if (const int code = used("cudaStreamIsCapturing")) return code;
  Stream* const stream = stream_of(handle, "cudaStreamIsCapturing");
  if (stream == nullptr) return kBadHandle;
  std::lock_guard<std::mutex> lock(stream->mutex);
  *status = stream->capturing;
  return kOk;
}
FAKE int cudaThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(*mode, this_thread().capture_mode);
  return entered("cudaThreadExchangeStreamCaptureMode");
}
FAKE int cudaStreamWaitEvent(void* handle, void* event_handle, unsigned) {
  if (const int code = used("cudaStreamWaitEvent")) return code;
  Stream* const stream = stream_of(handle, "cudaStreamWaitEvent");
  Event* const event = event_of(event_handle, "cudaStreamWaitEvent");
  if (stream == nullptr || event == nullptr) return kBadHandle;
  if (const auto moment = event->moment()) push(stream, [moment] { moment->await(); });
  return kOk;
}
FAKE int cudaEventCreateWithFlags(void** out, unsigned flags) {
  if (const int code = used("cudaEventCreateWithFlags")) return code;
  if ((flags & 2) == 0) misuse("an event that takes times costs more");
  Event* const made = new Event;
  made->device = this_thread().current_device;
  std::lock_guard<std::mutex> lock(world().mutex);
  world().events.insert(made);
  *out = made;
  return kOk;
}
FAKE int cudaEventDestroy(void* handle) {
  unsafe("cudaEventDestroy");
  if (event_of(handle, "cudaEventDestroy") == nullptr) return kBadHandle;
  std::lock_guard<std::mutex> lock(world().mutex);
  world().events.erase(handle);  // leaked: streams may still wait for it
  return kOk;
}
FAKE int cudaEventRecord(void* handle, void* stream_handle) {
  if (const int code = used("cudaEventRecord")) return code;
  Stream* const stream = stream_of(stream_handle, "cudaEventRecord");
  Event* const event = event_of(handle, "cudaEventRecord");
  if (stream == nullptr || event == nullptr) return kBadHandle;
  if (stream->device != event->device) {
    misuse("cudaEventRecord of an event on a stream of another device");
    return kBadHandle;
  }
  const auto moment = std::make_shared<Moment>();
  {
    std::lock_guard<std::mutex> lock(event->mutex);
    event->last = moment;
  }
  push(stream, [moment] { moment->pass(); });
  return kOk;
}
FAKE int cudaEventQuery(void* handle) {
  const int code = unsafe("cudaEventQuery");
  Event* const event = event_of(handle, "cudaEventQuery");
  if (event == nullptr) return kBadHandle;
  const auto moment = event->moment();
  if (moment == nullptr) return kOk;  // it knows of no device that could be broken
  return code != kOk ? code : moment->passed() ? kOk : kNotReady;
}
FAKE int cudaEventSynchronize(void* handle) {
  if (const int code = unsafe("cudaEventSynchronize")) return code;
  synchronised();
  Event* const event = event_of(handle, "cudaEventSynchronize");
  if (event == nullptr) return kBadHandle;
  if (const auto moment = event->moment()) moment->await();
  return kOk;
}
FAKE int cudaLaunchHostFunc(void* handle, void (*function)(void*), void* context) {
  if (const int code = used("cudaLaunchHostFunc")) return code;
  Stream* const stream = stream_of(handle, "cudaLaunchHostFunc");
  if (stream == nullptr) return kBadHandle;
  push(stream, [=] { run_on_host(function, context); });
  return kOk;
}
FAKE const char* cudaGetErrorString(int code) {
  return code == kInvalid ? "invalid argument" : code == kBadHandle ? "invalid resource handle" : "fake error";
}
// A context of the driver is the number of its device, and 1.
FAKE int cuInit(unsigned) {
  return entered("cuInit");
}
FAKE int cuDeviceGet(int* handle, int ordinal) {
  *handle = ordinal;
  return entered("cuDeviceGet");
}
FAKE int cuDevicePrimaryCtxRetain(void** context, int handle) {
  *context = reinterpret_cast<void*>(static_cast<intptr_t>(handle) + 1);
  std::lock_guard<std::mutex> lock(world().mutex);
  world().contexts |= uint64_t{1} << handle;
  ++world().retained;
  return world().broken;
}
FAKE int cuDevicePrimaryCtxRelease_v2(int) {
  std::lock_guard<std::mutex> lock(world().mutex);
  if (world().retained-- == 0 && world().misuses++ == 0) world().first_misuse = "a context that was not retained";
  return world().broken;
}
FAKE int cuCtxPushCurrent_v2(void* context) {
  Thread& t = this_thread();
  if (t.depth == 8) {
    misuse("cuCtxPushCurrent_v2 without cuCtxPopCurrent_v2");
    return kInvalid;
  }
  t.pushed[t.depth++] = {t.current_device, t.has_context};
  t.current_device = static_cast<int>(reinterpret_cast<intptr_t>(context)) - 1;
  t.has_context = true;
  return entered("cuCtxPushCurrent_v2");
}
FAKE int cuCtxPopCurrent_v2(void** context) {
  Thread& t = this_thread();
  *context = reinterpret_cast<void*>(static_cast<intptr_t>(t.current_device) + 1);
  if (t.depth == 0) {
    misuse("cuCtxPopCurrent_v2 without cuCtxPushCurrent_v2");
    return kInvalid;
  }
  const Thread::Before before = t.pushed[--t.depth];
  t.current_device = before.device;
  t.has_context = before.has_context;
  return entered("cuCtxPopCurrent_v2");
}
// The hardware looks at the word again and again, and so does this.
FAKE int cuStreamWaitValue32_v2(void* handle, unsigned long long address, uint32_t value, unsigned flags) {
  if (!this_thread().has_context) misuse("a function of the driver on a thread without context");
  if (const int code = used("cuStreamWaitValue32_v2")) return code;
  if (address % 4 != 0) return kInvalid;
  Stream* const stream = stream_of(handle, "cuStreamWaitValue32_v2");
  if (stream == nullptr || flags != 0) return kInvalid;
  if (!pinned(reinterpret_cast<const char*>(address), 4)) misuse("a wait on memory that is not pinned");
  push(stream, [=] {
    const auto* const word = reinterpret_cast<const std::atomic<uint32_t>*>(address);
    while (static_cast<int32_t>(word->load(std::memory_order_acquire) - value) < 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  });
  return kOk;
}
