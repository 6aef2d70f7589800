// State that all parts of the fake CUDA runtime share: streams, events, memory, counters.
#ifndef FAKE_CUDA_WORLD_H
#define FAKE_CUDA_WORLD_H

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>

#define FAKE extern "C" __attribute__((visibility("default")))

namespace fake_cuda {

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
  uint64_t misuses = 0, synchronisations = 0, contexts = 0, retained = 0;
  std::atomic<int> broken{0}, capturing{0};
  std::map<int, Stream*> null_streams;  // of every device
  std::atomic<uint64_t> stalled{0};     // a bit for each device

  std::mutex lock_mutex;  // guards the next two
  std::condition_variable lock_changed;
  std::map<int, std::thread::id> holders;  // who holds the lock of a device's context
  std::map<int, Queue*> shared;            // by priority

  std::mutex host_mutex;
  std::condition_variable host_changed;
  std::deque<std::function<void()>> host_queue;
  bool host_started = false;
};

World& world();

struct Thread {
  bool in_host_function = false;
  bool watched = false;  // its synchronisations are counted
  bool has_context = false;
  int current_device = 0;
  struct Before {
    int device;
    bool has_context;
  };
  Before pushed[8] = {};
  int depth = 0;         // of the driver's stack of contexts
  int capture_mode = 0;  // 0: cudaStreamCaptureModeGlobal, 2: ...Relaxed
};

Thread& this_thread();

void misuse(const std::string& what);

// Every function of CUDA begins with one of these, which returns the error that all calls have, or kOk.
int entered(const char* function);
// A call that makes a context on the thread's device, and waits for its lock.
int used(const char* function);
// One that spoils a capture anywhere in the process, unless the thread has said that it knows what it does.
int unsafe(const char* function);
// The host waits for the device.
void synchronised();

// The object of a handle; nullptr, and misuse, if there is none. nullptr, 1 and 2 are default streams.
Stream* stream_of(void* handle, const char* function);
Event* event_of(void* handle, const char* function);

Queue* start_queue();
void push(Stream* stream, std::function<void()> work);
// Whether all of it is memory that was registered.
bool pinned(const char* data, size_t bytes);

}  // namespace fake_cuda

#endif
