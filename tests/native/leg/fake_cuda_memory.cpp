// Copies, memory of the host that is pinned, memory of the device.
#include <chrono>
#include <cstdlib>
#include <cstring>

#include "fake_cuda_world.h"

using namespace fake_cuda;

namespace {

// Calls that free memory wait for all streams, and for ever if one of them waits for this thread.
void await_device() {
  std::set<void*> streams;
  {
    std::lock_guard<std::mutex> lock(world().mutex);
    streams = world().streams;
  }
  for (void* const handle : streams) {
    Stream* const stream = static_cast<Stream*>(handle);
    if (stream->device != this_thread().current_device) continue;
    std::unique_lock<std::mutex> lock(stream->mutex);
    const uint64_t until = stream->pushed;
    if (stream->changed.wait_for(lock, std::chrono::seconds(5), [&] { return stream->done >= until; })) continue;
    lock.unlock();
    misuse("cudaFree waits for a stream that waits for something else");
  }
}

std::multimap<const char*, size_t>::iterator begin_copy(const char* host, size_t bytes) {
  std::lock_guard<std::mutex> lock(world().mutex);
  return world().copying.emplace(host, bytes);
}

}  // namespace

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
