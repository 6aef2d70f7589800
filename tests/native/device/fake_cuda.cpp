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
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>

namespace {

constexpr int kOk = 0, kInvalid = 1, kNotReady = 600, kBadHandle = 400;

// Work in order, done by a thread. Streams have one each, or share it (FAKE_CUDA_ONE_QUEUE), as those of one priority
// may on a real device.
struct Queue {
  std::mutex mutex;  // guards what follows
  std::condition_variable changed;
  std::deque<std::function<void()>> work;
  bool ended = false;
};

struct Stream {
  int device = 0;
  Queue* queue = nullptr;
  bool shares = false;
  std::mutex mutex;  // guards what follows
  std::condition_variable changed;
  uint64_t pushed = 0, done = 0;
  int capturing = 0;
};

// One record of an event. Whoever waits for it is not concerned by later ones, which may be over sooner.
struct Moment {
  std::mutex mutex;
  std::condition_variable changed;
  bool over = false;

  void pass() {
    std::lock_guard<std::mutex> lock(mutex);
    over = true;
    changed.notify_all();
  }
  void await() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [this] { return over; });
  }
  bool passed() {
    std::lock_guard<std::mutex> lock(mutex);
    return over;
  }
};

struct Event {
  int device = 0;
  std::mutex mutex;
  std::shared_ptr<Moment> last;  // nullptr: never recorded

  std::shared_ptr<Moment> moment() {
    std::lock_guard<std::mutex> lock(mutex);
    return last;
  }
};

struct World {
  std::mutex mutex;
  std::set<void*> streams, events;
  std::map<char*, size_t> registered;
  std::map<void*, size_t> allocated;
  std::multimap<const char*, size_t> copying;  // host memory that copies in flight use
  std::string first_misuse;
  uint64_t misuses = 0, synchronisations = 0, contexts = 0;
  std::atomic<int> broken{0}, capturing{0};
  std::map<int, Stream*> null_streams;  // of every device
  std::map<int, Queue*> shared;         // by priority

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

thread_local bool in_host_function = false, watched = false, has_context = false;
thread_local int current_device = 0, capture_mode = 0;  // 0: cudaStreamCaptureModeGlobal, 2: ...Relaxed

void misuse(const std::string& what) {
  std::lock_guard<std::mutex> lock(world().mutex);
  if (world().misuses++ == 0) world().first_misuse = what;
}

int entered(const char* function) {
  if (in_host_function) misuse(std::string(function) + " in a host function");
  return world().broken.load();
}

// A call that makes a context on the thread's device.
int used(const char* function) {
  has_context = true;
  {
    std::lock_guard<std::mutex> lock(world().mutex);
    world().contexts |= uint64_t{1} << current_device;
  }
  return entered(function);
}

// One that spoils a capture anywhere in the process, unless the thread has said that it knows what it does.
int unsafe(const char* function) {
  if (world().capturing > 0 && capture_mode != 2) misuse(std::string(function) + " while a stream is being captured");
  return used(function);
}

void serve(Queue* queue) {
  std::unique_lock<std::mutex> lock(queue->mutex);
  for (;;) {
    queue->changed.wait(lock, [queue] { return !queue->work.empty() || queue->ended; });
    if (queue->work.empty()) return;  // leaked: handles stay comparable
    auto work = std::move(queue->work.front());
    queue->work.pop_front();
    lock.unlock();
    work();
    lock.lock();
  }
}

Queue* start_queue() {
  Queue* const queue = new Queue;
  std::thread(serve, queue).detach();
  return queue;
}

Stream* stream_of(void* handle, const char* function) {
  World& w = world();
  std::lock_guard<std::mutex> lock(w.mutex);
  if (handle == nullptr || handle == reinterpret_cast<void*>(1) || handle == reinterpret_cast<void*>(2)) {
    Stream*& found = w.null_streams[current_device];
    if (found == nullptr) {
      found = new Stream;
      found->device = current_device;
      found->queue = start_queue();
    }
    return found;
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
  {
    std::lock_guard<std::mutex> lock(stream->mutex);
    ++stream->pushed;
  }
  std::lock_guard<std::mutex> lock(stream->queue->mutex);
  stream->queue->work.push_back([stream, work = std::move(work)] {
    work();
    std::lock_guard<std::mutex> inner(stream->mutex);
    ++stream->done;
    stream->changed.notify_all();
  });
  stream->queue->changed.notify_all();
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

void synchronised() {
  if (!watched) return;
  std::lock_guard<std::mutex> lock(world().mutex);
  ++world().synchronisations;
}

// What frees memory waits for all streams, and for ever if one of them waits for this thread.
void await_device() {
  std::set<void*> streams;
  {
    std::lock_guard<std::mutex> lock(world().mutex);
    streams = world().streams;
  }
  for (void* const handle : streams) {
    Stream* const stream = static_cast<Stream*>(handle);
    if (stream->device != current_device) continue;
    std::unique_lock<std::mutex> lock(stream->mutex);
    const uint64_t until = stream->pushed;
    if (stream->changed.wait_for(lock, std::chrono::seconds(5), [&] { return stream->done >= until; })) continue;
    lock.unlock();
    misuse("cudaFree waits for a stream that waits for something else");
  }
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
FAKE int cudaStreamCreateWithPriority(void** out, unsigned flags, int priority) {
  if (const int code = used("cudaStreamCreateWithPriority")) return code;
  if (flags != 1) misuse("a stream that waits for the default stream");
  if (priority > 0 || priority < -5) misuse("a priority that the device does not have");
  Stream* const made = new Stream;
  *out = made;
  made->device = current_device;
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
FAKE void fake_cuda_drain(void* handle) {
  Stream* const stream = stream_of(handle, "fake_cuda_drain");
  if (stream == nullptr) return;
  std::unique_lock<std::mutex> lock(stream->mutex);
  const uint64_t until = stream->pushed;
  stream->changed.wait(lock, [&] { return stream->done >= until; });
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
  std::swap(*mode, capture_mode);
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
  made->device = current_device;
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
  if (const int code = unsafe("cudaEventQuery")) return code;
  Event* const event = event_of(handle, "cudaEventQuery");
  if (event == nullptr) return kBadHandle;
  const auto moment = event->moment();
  return moment == nullptr || moment->passed() ? kOk : kNotReady;
}
FAKE int cudaEventSynchronize(void* handle) {
  if (const int code = unsafe("cudaEventSynchronize")) return code;
  synchronised();
  Event* const event = event_of(handle, "cudaEventSynchronize");
  if (event == nullptr) return kBadHandle;
  if (const auto moment = event->moment()) moment->await();
  return kOk;
}
FAKE int cudaMemcpyAsync(void* dst, const void* src, size_t bytes, int kind, void* handle) {
  if (const int code = used("cudaMemcpyAsync")) return code;
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
  if (const int code = used("cudaMemsetAsync")) return code;
  Stream* const stream = stream_of(handle, "cudaMemsetAsync");
  if (stream == nullptr) return kBadHandle;
  push(stream, [=] { memset(dst, value, bytes); });
  return kOk;
}
FAKE int cudaLaunchHostFunc(void* handle, void (*function)(void*), void* context) {
  if (const int code = used("cudaLaunchHostFunc")) return code;
  Stream* const stream = stream_of(handle, "cudaLaunchHostFunc");
  if (stream == nullptr) return kBadHandle;
  push(stream, [=] { run_on_host(function, context); });
  return kOk;
}
FAKE int cudaHostRegister(void* data, size_t bytes, unsigned) {
  if (const int code = unsafe("cudaHostRegister")) return code;
  std::lock_guard<std::mutex> lock(world().mutex);
  world().registered[static_cast<char*>(data)] = bytes;
  return kOk;
}
FAKE int cudaHostUnregister(void* data) {
  unsafe("cudaHostUnregister");
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
  if (const int code = unsafe("cudaMalloc")) return code;
  *out = aligned_alloc(256, (bytes + 255) / 256 * 256);
  memset(*out, 0xa5, bytes);
  std::lock_guard<std::mutex> lock(world().mutex);
  world().allocated[*out] = bytes;
  return kOk;
}
FAKE int cudaFree(void* data) {
  unsafe("cudaFree");
  if (data == nullptr) return kOk;
  synchronised();
  await_device();
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
  if (!has_context) misuse("a function of the driver on a thread without context");
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
FAKE uint64_t fake_cuda_contexts(void) {
  std::lock_guard<std::mutex> lock(world().mutex);
  return world().contexts;
}
FAKE void fake_cuda_set_capturing(void* handle, int status) {
  Stream* const stream = stream_of(handle, "fake_cuda_set_capturing");
  std::lock_guard<std::mutex> lock(stream->mutex);
  world().capturing += (status != 0 ? 1 : 0) - (stream->capturing != 0 ? 1 : 0);
  stream->capturing = status;
}
FAKE void fake_cuda_break(int code) {
  world().broken = code;
}
