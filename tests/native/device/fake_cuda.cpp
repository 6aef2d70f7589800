#include "fake_cuda.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>

namespace {

constexpr int kOk = 0, kInvalid = 1, kNotReady = 600, kBadHandle = 400;

struct Stream {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> queue;
  uint64_t pushed = 0, done = 0;
  bool destroyed = false;
  int capturing = 0;
};

struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t recorded = 0, done = 0;
};

struct World {
  std::mutex mutex;
  std::set<void*> streams, events;
  std::map<char*, size_t> registered;
  std::map<void*, size_t> allocated;
  std::multimap<const char*, size_t> copying;  // host memory that copies in flight use
  std::string first_misuse;
  uint64_t misuses = 0, synchronisations = 0;
  std::atomic<int> broken{0};
  Stream null_stream;
  bool null_started = false;

  std::mutex host_mutex;
  std::condition_variable host_changed;
  std::deque<std::function<void()>> host_queue;
  bool host_started = false;
};

// Never destroyed: threads outlive main().
World& world() {
  static World* const made = new World;
  return *made;
}

thread_local bool in_host_function = false, watched = false;
thread_local int current_device = 0;

void misuse(const std::string& what) {
  std::lock_guard<std::mutex> lock(world().mutex);
  if (world().misuses++ == 0) world().first_misuse = what;
}

int entered(const char* function) {
  if (in_host_function) misuse(std::string(function) + " in a host function");
  return world().broken.load();
}

void serve(Stream* stream) {
  std::unique_lock<std::mutex> lock(stream->mutex);
  for (;;) {
    stream->changed.wait(lock, [stream] { return !stream->queue.empty() || stream->destroyed; });
    if (stream->queue.empty()) return;  // leaked: handles stay comparable
    auto work = std::move(stream->queue.front());
    stream->queue.pop_front();
    lock.unlock();
    work();
    lock.lock();
    ++stream->done;
    stream->changed.notify_all();
  }
}

Stream* stream_of(void* handle, const char* function) {
  World& w = world();
  std::lock_guard<std::mutex> lock(w.mutex);
  if (handle == nullptr || handle == reinterpret_cast<void*>(1) || handle == reinterpret_cast<void*>(2)) {
    if (!w.null_started) std::thread(serve, &w.null_stream).detach();
    w.null_started = true;
    return &w.null_stream;
  }
  if (w.streams.count(handle) != 0) return static_cast<Stream*>(handle);
  if (w.misuses++ == 0) w.first_misuse = std::string(function) + ": a stream that does not exist";
  return nullptr;
}

Event* event_of(void* handle, const char* function) {
  World& w = world();
  std::lock_guard<std::mutex> lock(w.mutex);
  if (w.events.count(handle) != 0) return static_cast<Event*>(handle);
  if (w.misuses++ == 0) w.first_misuse = std::string(function) + ": an event that does not exist";
  return nullptr;
}

void push(Stream* stream, std::function<void()> work) {
  std::lock_guard<std::mutex> lock(stream->mutex);
  stream->queue.push_back(std::move(work));
  ++stream->pushed;
  stream->changed.notify_all();
}

// One thread for all host functions of the process, as CUDA is free to do.
void serve_host() {
  in_host_function = true;
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

void synchronised() {
  if (!watched) return;
  std::lock_guard<std::mutex> lock(world().mutex);
  ++world().synchronisations;
}

bool pinned(const char* data, size_t bytes) {
  std::lock_guard<std::mutex> lock(world().mutex);
  auto found = world().registered.upper_bound(const_cast<char*>(data));
  if (found == world().registered.begin()) return false;
  --found;
  return data + bytes <= found->first + found->second;
}

std::multimap<const char*, size_t>::iterator begin_copy(const char* host, size_t bytes) {
  std::lock_guard<std::mutex> lock(world().mutex);
  return world().copying.emplace(host, bytes);
}

}  // namespace

#define FAKE extern "C" __attribute__((visibility("default")))

FAKE int cudaGetDevice(int* device) {
  *device = current_device;
  return entered("cudaGetDevice");
}
FAKE int cudaSetDevice(int device) {
  current_device = device;
  return entered("cudaSetDevice");
}
FAKE int cudaDeviceGetPCIBusId(char* out, int length, int device) {
  const char* const given = getenv("FAKE_CUDA_BUS_ID");
  snprintf(out, static_cast<size_t>(length), "%s", given != nullptr ? given : "0000:00:00.0");
  if (given == nullptr && length > 7) out[6] = static_cast<char>('0' + device % 10);
  return entered("cudaDeviceGetPCIBusId");
}
FAKE int cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return entered("cudaDeviceGetStreamPriorityRange");
}
FAKE int cudaStreamCreateWithPriority(void** out, unsigned, int) {
  if (const int code = entered("cudaStreamCreateWithPriority")) return code;
  Stream* const made = new Stream;
  *out = made;
  {
    std::lock_guard<std::mutex> lock(world().mutex);
    world().streams.insert(made);
  }
  std::thread(serve, made).detach();
  return kOk;
}
FAKE int cudaStreamDestroy(void* handle) {
  entered("cudaStreamDestroy");
  Stream* const stream = stream_of(handle, "cudaStreamDestroy");
  if (stream == nullptr) return kBadHandle;
  {
    std::lock_guard<std::mutex> lock(world().mutex);
    world().streams.erase(handle);
  }
  std::lock_guard<std::mutex> lock(stream->mutex);
  stream->destroyed = true;
  stream->changed.notify_all();
  return kOk;
}
FAKE int cudaStreamQuery(void* handle) {
  if (const int code = entered("cudaStreamQuery")) return code;
  Stream* const stream = stream_of(handle, "cudaStreamQuery");
  if (stream == nullptr) return kBadHandle;
  std::lock_guard<std::mutex> lock(stream->mutex);
  return stream->done == stream->pushed ? kOk : kNotReady;
}
FAKE void fake_cuda_drain(void* handle) {
  Stream* const stream = stream_of(handle, "fake_cuda_drain");
  if (stream == nullptr) return;
  std::unique_lock<std::mutex> lock(stream->mutex);
  const uint64_t until = stream->pushed;
  stream->changed.wait(lock, [&] { return stream->done >= until; });
}
FAKE int cudaStreamSynchronize(void* handle) {
  if (const int code = entered("cudaStreamSynchronize")) return code;
  synchronised();
  fake_cuda_drain(handle);
  return kOk;
}
FAKE int cudaStreamIsCapturing(void* handle, int* status) {
  if (const int code = entered("cudaStreamIsCapturing")) return code;
  Stream* const stream = stream_of(handle, "cudaStreamIsCapturing");
  if (stream == nullptr) return kBadHandle;
  std::lock_guard<std::mutex> lock(stream->mutex);
  *status = stream->capturing;
  return kOk;
}
FAKE int cudaThreadExchangeStreamCaptureMode(int* mode) {
  *mode = 0;
  return entered("cudaThreadExchangeStreamCaptureMode");
}
FAKE int cudaStreamWaitEvent(void* handle, void* event_handle, unsigned) {
  if (const int code = entered("cudaStreamWaitEvent")) return code;
  Stream* const stream = stream_of(handle, "cudaStreamWaitEvent");
  Event* const event = event_of(event_handle, "cudaStreamWaitEvent");
  if (stream == nullptr || event == nullptr) return kBadHandle;
  uint64_t until = 0;
  {
    std::lock_guard<std::mutex> lock(event->mutex);
    until = event->recorded;
  }
  push(stream, [event, until] {
    std::unique_lock<std::mutex> lock(event->mutex);
    event->changed.wait(lock, [&] { return event->done >= until; });
  });
  return kOk;
}
FAKE int cudaEventCreateWithFlags(void** out, unsigned flags) {
  if (const int code = entered("cudaEventCreateWithFlags")) return code;
  if ((flags & 2) == 0) misuse("an event that takes times costs more");
  Event* const made = new Event;
  std::lock_guard<std::mutex> lock(world().mutex);
  world().events.insert(made);
  *out = made;
  return kOk;
}
FAKE int cudaEventDestroy(void* handle) {
  entered("cudaEventDestroy");
  if (event_of(handle, "cudaEventDestroy") == nullptr) return kBadHandle;
  std::lock_guard<std::mutex> lock(world().mutex);
  world().events.erase(handle);  // leaked: streams may still wait for it
  return kOk;
}
FAKE int cudaEventRecord(void* handle, void* stream_handle) {
  if (const int code = entered("cudaEventRecord")) return code;
  Stream* const stream = stream_of(stream_handle, "cudaEventRecord");
  Event* const event = event_of(handle, "cudaEventRecord");
  if (stream == nullptr || event == nullptr) return kBadHandle;
  uint64_t number = 0;
  {
    std::lock_guard<std::mutex> lock(event->mutex);
    number = ++event->recorded;
  }
  push(stream, [event, number] {
    std::lock_guard<std::mutex> lock(event->mutex);
    event->done = std::max(event->done, number);
    event->changed.notify_all();
  });
  return kOk;
}
FAKE int cudaEventQuery(void* handle) {
  if (const int code = entered("cudaEventQuery")) return code;
  Event* const event = event_of(handle, "cudaEventQuery");
  if (event == nullptr) return kBadHandle;
  std::lock_guard<std::mutex> lock(event->mutex);
  return event->done == event->recorded ? kOk : kNotReady;
}
FAKE int cudaEventSynchronize(void* handle) {
  if (const int code = entered("cudaEventSynchronize")) return code;
  synchronised();
  Event* const event = event_of(handle, "cudaEventSynchronize");
  if (event == nullptr) return kBadHandle;
  std::unique_lock<std::mutex> lock(event->mutex);
  const uint64_t until = event->recorded;
  event->changed.wait(lock, [&] { return event->done >= until; });
  return kOk;
}
FAKE int cudaMemcpyAsync(void* dst, const void* src, size_t bytes, int kind, void* handle) {
  if (const int code = entered("cudaMemcpyAsync")) return code;
  Stream* const stream = stream_of(handle, "cudaMemcpyAsync");
  if (stream == nullptr) return kBadHandle;
  const char* const host = kind == 1 ? static_cast<const char*>(src) : kind == 2 ? static_cast<char*>(dst) : nullptr;
  if (host == nullptr) {
    push(stream, [=] { memcpy(dst, src, bytes); });
    return kOk;
  }
  if (!pinned(host, bytes)) misuse("a copy with memory that is not pinned makes the caller wait");
  const auto entry = begin_copy(host, bytes);
  push(stream, [=] {
    memcpy(dst, src, bytes);
    std::lock_guard<std::mutex> lock(world().mutex);
    world().copying.erase(entry);
  });
  return kOk;
}
FAKE int cudaMemsetAsync(void* dst, int value, size_t bytes, void* handle) {
  if (const int code = entered("cudaMemsetAsync")) return code;
  Stream* const stream = stream_of(handle, "cudaMemsetAsync");
  if (stream == nullptr) return kBadHandle;
  push(stream, [=] { memset(dst, value, bytes); });
  return kOk;
}
FAKE int cudaLaunchHostFunc(void* handle, void (*function)(void*), void* context) {
  if (const int code = entered("cudaLaunchHostFunc")) return code;
  Stream* const stream = stream_of(handle, "cudaLaunchHostFunc");
  if (stream == nullptr) return kBadHandle;
  push(stream, [=] { run_on_host(function, context); });
  return kOk;
}
FAKE int cudaHostRegister(void* data, size_t bytes, unsigned) {
  if (const int code = entered("cudaHostRegister")) return code;
  std::lock_guard<std::mutex> lock(world().mutex);
  world().registered[static_cast<char*>(data)] = bytes;
  return kOk;
}
FAKE int cudaHostUnregister(void* data) {
  entered("cudaHostUnregister");
  World& w = world();
  std::lock_guard<std::mutex> lock(w.mutex);
  const auto found = w.registered.find(static_cast<char*>(data));
  if (found == w.registered.end()) {
    if (w.misuses++ == 0) w.first_misuse = "cudaHostUnregister of memory that is not registered";
    return kInvalid;
  }
  for (const auto& [begin, bytes] : w.copying) {
    if (begin < found->first + found->second && found->first < begin + bytes) {
      if (w.misuses++ == 0) w.first_misuse = "cudaHostUnregister while a copy uses the memory";
    }
  }
  w.registered.erase(found);
  return kOk;
}
FAKE int cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  *device = host;
  return entered("cudaHostGetDevicePointer");
}
FAKE int cudaMalloc(void** out, size_t bytes) {
  if (const int code = entered("cudaMalloc")) return code;
  *out = aligned_alloc(256, (bytes + 255) / 256 * 256);
  memset(*out, 0xa5, bytes);
  std::lock_guard<std::mutex> lock(world().mutex);
  world().allocated[*out] = bytes;
  return kOk;
}
FAKE int cudaFree(void* data) {
  entered("cudaFree");
  if (data == nullptr) return kOk;
  synchronised();
  {
    std::lock_guard<std::mutex> lock(world().mutex);
    if (world().allocated.erase(data) == 0) {
      if (world().misuses++ == 0) world().first_misuse = "cudaFree of memory that is not allocated";
      return kInvalid;
    }
  }
  free(data);
  return kOk;
}
FAKE const char* cudaGetErrorString(int code) {
  return code == kInvalid ? "invalid argument" : code == kBadHandle ? "invalid resource handle" : "fake error";
}
// The hardware looks at the word again and again, and so does this.
FAKE int cuStreamWaitValue32_v2(void* handle, unsigned long long address, uint32_t value, unsigned flags) {
  if (const int code = entered("cuStreamWaitValue32_v2")) return code;
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

FAKE void fake_cuda_enqueue(void* handle, void (*work)(void*), void* context) {
  Stream* const stream = stream_of(handle, "a launch");
  if (stream != nullptr) push(stream, [=] { work(context); });
}
FAKE void fake_cuda_fill(void* handle, float* data, uint64_t count, float value) {
  push(stream_of(handle, "a launch"), [=] { std::fill(data, data + count, value); });
}
FAKE void fake_cuda_copy_slowly(void* handle, float* dst, const float* src, uint64_t count, uint32_t milliseconds) {
  push(stream_of(handle, "a launch"), [=] {
    std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
    std::copy(src, src + count, dst);
  });
}
FAKE void fake_cuda_gate(void* handle, const volatile uint32_t* word) {
  push(stream_of(handle, "a launch"), [=] {
    const auto* const shared =
        const_cast<const std::atomic<uint32_t>*>(reinterpret_cast<const volatile std::atomic<uint32_t>*>(word));
    while (shared->load() == 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
  });
}
FAKE void fake_cuda_watch_this_thread(void) {
  watched = true;
}
FAKE void fake_cuda_unwatch_this_thread(void) {
  watched = false;
}
FAKE uint64_t fake_cuda_host_synchronisations(void) {
  std::lock_guard<std::mutex> lock(world().mutex);
  return world().synchronisations;
}
FAKE uint64_t fake_cuda_misuses(void) {
  std::lock_guard<std::mutex> lock(world().mutex);
  return world().misuses;
}
FAKE const char* fake_cuda_first_misuse(void) {
  std::lock_guard<std::mutex> lock(world().mutex);
  return world().first_misuse.c_str();
}
FAKE uint64_t fake_cuda_streams(void) {
  std::lock_guard<std::mutex> lock(world().mutex);
  return world().streams.size();
}
FAKE uint64_t fake_cuda_events(void) {
  std::lock_guard<std::mutex> lock(world().mutex);
  return world().events.size();
}
FAKE uint64_t fake_cuda_allocated(void) {
  std::lock_guard<std::mutex> lock(world().mutex);
  return world().allocated.size();
}
FAKE uint64_t fake_cuda_registered(void) {
  std::lock_guard<std::mutex> lock(world().mutex);
  return world().registered.size();
}
FAKE void fake_cuda_set_capturing(void* handle, int status) {
  Stream* const stream = stream_of(handle, "fake_cuda_set_capturing");
  std::lock_guard<std::mutex> lock(stream->mutex);
  stream->capturing = status;
}
FAKE void fake_cuda_break(int code) {
  world().broken = code;
}
