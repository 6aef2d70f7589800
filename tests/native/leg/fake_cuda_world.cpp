#include "fake_cuda_world.h"

#include <chrono>
#include <utility>

namespace fake_cuda {

// Never destroyed: threads outlive main().
World& world() {
  static World* const made = new World;
  return *made;
}

Thread& this_thread() {
  static thread_local Thread found;
  return found;
}

void misuse(const std::string& what) {
  std::lock_guard<std::mutex> lock(world().mutex);
  if (world().misuses++ == 0) world().first_misuse = what;
}

int entered(const char* function) {
  if (this_thread().in_host_function) misuse(std::string(function) + " in a host function");
  return world().broken.load();
}

int used(const char* function) {
  const int device = this_thread().current_device;
  this_thread().has_context = true;
  {
    std::lock_guard<std::mutex> lock(world().mutex);
    world().contexts |= uint64_t{1} << device;
  }
  {
    std::unique_lock<std::mutex> lock(world().lock_mutex);
    world().lock_changed.wait(lock, [device] {
      const auto found = world().holders.find(device);
      return found == world().holders.end() || found->second == std::this_thread::get_id();
    });
  }
  return entered(function);
}

int unsafe(const char* function) {
  if (world().capturing > 0 && this_thread().capture_mode != 2)
    misuse(std::string(function) + " while a stream is being captured");
  return used(function);
}

namespace {

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

}  // namespace

Queue* start_queue() {
  Queue* const queue = new Queue;
  std::thread(serve, queue).detach();
  return queue;
}

Stream* stream_of(void* handle, const char* function) {
  World& w = world();
  std::lock_guard<std::mutex> lock(w.mutex);
  if (handle == nullptr || handle == reinterpret_cast<void*>(1) || handle == reinterpret_cast<void*>(2)) {
    Stream*& found = w.null_streams[this_thread().current_device];
    if (found == nullptr) {
      found = new Stream;
      found->device = this_thread().current_device;
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
    while ((world().stalled >> stream->device & 1) != 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    work();
    std::lock_guard<std::mutex> inner(stream->mutex);
    ++stream->done;
    stream->changed.notify_all();
  });
  stream->queue->changed.notify_all();
}

void synchronised() {
  if (!this_thread().watched) return;
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

}  // namespace fake_cuda
