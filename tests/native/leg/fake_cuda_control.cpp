// Functions that tests call: kernels, counters, faults.
#include <algorithm>
#include <chrono>
#include <thread>

#include "fake_cuda.h"
#include "fake_cuda_world.h"

using namespace fake_cuda;

FAKE void fake_cuda_drain(void* handle) {
  Stream* const stream = stream_of(handle, "fake_cuda_drain");
  if (stream == nullptr) return;
  std::unique_lock<std::mutex> lock(stream->mutex);
  const uint64_t until = stream->pushed;
  stream->changed.wait(lock, [&] { return stream->done >= until; });
}
FAKE void fake_cuda_enqueue(void* handle, void (*work)(void*), void* context) {
  Stream* const stream = stream_of(handle, "a launch");
  if (stream != nullptr) push(stream, [=] { work(context); });
}
// "Kernels".
FAKE void fake_cuda_fill(void* handle, float* data, uint64_t count, float value) {
  push(stream_of(handle, "a launch"), [=] { std::fill(data, data + count, value); });
}
FAKE void fake_cuda_copy_slowly(void* handle, float* dst, const float* src, uint64_t count, uint32_t milliseconds) {
  push(stream_of(handle, "a launch"), [=] {
    std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
    std::copy(src, src + count, dst);
  });
}
// As a call does that waits for a stream with the context's lock (a first launch of a kernel, a copy to memory that is
// not pinned): whatever else uses this thread's device waits meanwhile. 0: the stream was not idle within 5 s.
FAKE int fake_cuda_drain_with_the_lock(void* handle) {
  Stream* const stream = stream_of(handle, "fake_cuda_drain_with_the_lock");
  if (stream == nullptr) return 0;
  World& w = world();
  {
    std::lock_guard<std::mutex> lock(w.lock_mutex);
    w.holders[stream->device] = std::this_thread::get_id();
  }
  bool idle = false;
  {
    std::unique_lock<std::mutex> lock(stream->mutex);
    const uint64_t until = stream->pushed;
    idle = stream->changed.wait_for(lock, std::chrono::seconds(5), [&] { return stream->done >= until; });
  }
  std::lock_guard<std::mutex> lock(w.lock_mutex);
  w.holders.erase(stream->device);
  w.lock_changed.notify_all();
  return idle ? 1 : 0;
}
// Streams of a device stand still, and all questions are answered: "not ready".
FAKE void fake_cuda_stall(int device, int on) {
  const uint64_t bit = uint64_t{1} << device;
  if (on != 0) world().stalled |= bit;
  if (on == 0) world().stalled &= ~bit;
}
// From now on, synchronisation by this thread is counted.
FAKE void fake_cuda_watch_this_thread(void) {
  this_thread().watched = true;
}
FAKE void fake_cuda_unwatch_this_thread(void) {
  this_thread().watched = false;
}
FAKE void fake_cuda_note_misuse(const char* what) {
  misuse(what);
}
#define COUNT(name, value)                           \
  FAKE uint64_t fake_cuda_##name(void) {             \
    std::lock_guard<std::mutex> lock(world().mutex); \
    return world().value;                            \
  }
// What exists now. `contexts`: a bit for each device that has one; since CUDA 12 cudaSetDevice() makes it.
COUNT(host_synchronisations, synchronisations)
COUNT(misuses, misuses)
COUNT(streams, streams.size())
COUNT(events, events.size())
COUNT(allocated, allocated.size())
COUNT(registered, registered.size())
COUNT(contexts, contexts)
FAKE const char* fake_cuda_first_misuse(void) {
  std::lock_guard<std::mutex> lock(world().mutex);
  return world().first_misuse.c_str();
}
FAKE void fake_cuda_forget_contexts(void) {
  std::lock_guard<std::mutex> lock(world().mutex);
  world().contexts = 0;
}
// Sets the answer of cudaStreamIsCapturing. Meanwhile, calls that spoil a capture are misuse.
FAKE void fake_cuda_set_capturing(void* handle, int status) {
  Stream* const stream = stream_of(handle, "fake_cuda_set_capturing");
  std::lock_guard<std::mutex> lock(stream->mutex);
  world().capturing += (status != 0 ? 1 : 0) - (stream->capturing != 0 ? 1 : 0);
  stream->capturing = status;
}
// Every call fails with this code from now on; 0: none does.
FAKE void fake_cuda_break(int code) {
  world().broken = code;
}
