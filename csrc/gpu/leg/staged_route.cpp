#include "gpu/leg/staged_route.h"

#include <poll.h>

#include <algorithm>

#include "base/clock.h"

namespace bagua::device {

namespace {

constexpr uint64_t kAlign = 256;
constexpr uint32_t kAllPassed = 1u << 30;  // ahead of every pending sequence number; numbers are compared modulo 2^32
constexpr int64_t kDrainNs = 10 * kNsPerS;

// True if the result may overwrite the input in shared memory, which then takes less room in the caches.
bool in_place(Kind kind) {
  return kind == Kind::kAllReduce || kind == Kind::kReduce || kind == Kind::kBroadcast;
}

}  // namespace

StagedRoute::~StagedRoute() {
  if (out_ != nullptr) runtime_->libraries.cuda.stream_destroy(out_);
  if (in_ != nullptr) runtime_->libraries.cuda.stream_destroy(in_);
}

Status StagedRoute::open() {
  if (Status status = runtime_->make_stream(Traffic::kOut, &out_); !status) return status;
  if (Status status = runtime_->make_stream(Traffic::kIn, &in_); !status) return status;
  if (Status status = runtime_->take_pinned(sizeof(uint32_t), &word_memory_); !status) return status;
  word_ = new (word_memory_.data) std::atomic<uint32_t>(0);
  void* address = nullptr;
  const CudaRuntime& cuda = runtime_->libraries.cuda;
  if (Status status = runtime_->cuda(cuda.host_address(&address, word_memory_.data, 0), "mapping memory"); !status) {
    return status;
  }
  word_on_device_ = reinterpret_cast<DriverAddress>(address);
  listener_ = runtime_->failure.listen([this] { release_all(); });
  wait_id_ = runtime_->wait_clock.add([this] { return look(); });
  poll_id_ = runtime_->poller.add([this] { reap(); });
  thread_ = std::thread([this] { serve(); });
  return Status::ok();
}

Status StagedRoute::place(Operation* operation) {
  Descriptor& d = operation->descriptor;
  const bool together = operation->src_bytes == 0 || operation->dst_bytes == 0 || in_place(operation->kind());
  const uint64_t first = (operation->src_bytes + kAlign - 1) / kAlign * kAlign;
  operation->dst_offset = together ? 0 : first;
  const uint64_t bytes =
      std::max(operation->src_bytes, operation->dst_bytes == 0 ? 0 : operation->dst_offset + operation->dst_bytes);
  if (Status status = runtime_->take_pinned(bytes, &operation->memory); !status) return status;
  d.src_segment = operation->src_bytes == 0 ? 0 : static_cast<uint32_t>(operation->memory.segment);
  d.dst_segment = operation->dst_bytes == 0 ? 0 : static_cast<uint32_t>(operation->memory.segment);
  d.src_offset = 0;
  d.dst_offset = operation->dst_bytes == 0 ? 0 : operation->dst_offset;
  return Status::ok();
}

Status StagedRoute::submit(Operation* operation, CudaEvent begin) {
  reap();
  if (Status status = place(operation); !status) return status;
  operation->staged = this;
  operation->stage = Operation::Stage::kCopying;
  operation->enqueued = false;
  CudaEvent copied = nullptr;
  if (Status status = runtime_->take_event(&copied); !status) return status;
  const Lock lock(mutex_);
  operation->sequence = ++sequence_;
  // From here on the operation belongs to the route's thread even after an error, because CUDA may hold a pointer to
  // it.
  {
    const Lock queue_lock(queue_mutex_);
    queue_.push_back(operation);
  }
  Status status = enqueue_out(operation, begin);
  const CudaRuntime& cuda = runtime_->libraries.cuda;
  if (status) status = runtime_->cuda(cuda.event_record(copied, out_), "recording an event");
  if (status) status = enqueue_in(operation, copied);
  runtime_->put_event(copied);
  {
    const Lock queue_lock(queue_mutex_);
    operation->enqueued = true;
    changed_.notify_all();
  }
  if (!status) runtime_->failure.fail(name_of(*operation) + ": " + status.message());
  return status;
}

Status StagedRoute::enqueue_out(Operation* operation, CudaEvent begin) {
  const CudaRuntime& cuda = runtime_->libraries.cuda;
  Status status = runtime_->cuda(cuda.stream_wait_event(out_, begin, 0), "waiting for the caller's stream");
  if (status && operation->src_bytes > 0) {
    status =
        runtime_->cuda(cuda.copy(operation->memory.data, operation->src, operation->src_bytes, kDeviceToHost, out_),
                       "copying to shared memory");
  }
  if (status) status = runtime_->cuda(cuda.host_function(out_, &copied_function, operation), "enqueuing a function");
  return status;
}

Status StagedRoute::enqueue_in(Operation* operation, CudaEvent copied) {
  const CudaRuntime& cuda = runtime_->libraries.cuda;
  Status status = runtime_->cuda(cuda.stream_wait_event(in_, copied, 0), "waiting for a copy");
  if (!status) return status;
  const auto wait = runtime_->libraries.driver.wait_value;
  status = runtime_->cuda(wait(in_, word_on_device_, operation->sequence, kWaitValueGeq), "waiting for the daemon");
  if (status && operation->dst_bytes > 0) {
    status = runtime_->cuda(cuda.copy(operation->dst, operation->memory.data + operation->dst_offset,
                                      operation->dst_bytes, kHostToDevice, in_),
                            "copying from shared memory");
  }
  if (status) status = runtime_->cuda(cuda.event_record(operation->end, in_), "recording an event");
  return status;
}

// Runs on a thread of CUDA and must not call CUDA.
void StagedRoute::copied_function(void* operation) {
  Operation* const copied = static_cast<Operation*>(operation);
  copied->started_ns.store(now_ns(), std::memory_order_relaxed);
  copied->staged->runtime_->slots.enter(copied);
}

void StagedRoute::submit_to_daemon(Operation* operation) {
  HostError error;
  uint64_t ticket = 0;
  Status status = runtime_->failure.status();
  if (status) {
    const HostApi& host = runtime_->host;
    status = runtime_->host_status(host.submit(host.client, &operation->descriptor, &ticket, &error), error);
  }
  if (!status) runtime_->failure.fail(status.message());
  const Lock lock(queue_mutex_);
  operation->host_ticket = ticket;
  operation->stage = status ? Operation::Stage::kAtHost : Operation::Stage::kFailed;
  changed_.notify_all();
}

// The daemon has ended the oldest operation: lets the GPU continue.
void StagedRoute::release(Operation* operation) {
  const Lock lock(queue_mutex_);
  queue_.pop_front();
  landing_.push_back(operation);
  progress_ns_ = now_ns();
  if (!runtime_->failure.failed()) word_->store(operation->sequence);
  changed_.notify_all();
}

void StagedRoute::release_all() {
  const Lock lock(queue_mutex_);
  word_->store(word_->load() + kAllPassed);
  changed_.notify_all();
}

// Waits for the oldest operation whose input has left the device. False: the route closes.
bool StagedRoute::next(Operation** operation) {
  Lock lock(queue_mutex_);
  const auto left_device = [this]() REQUIRES(queue_mutex_) {
    return !queue_.empty() && queue_.front()->enqueued && queue_.front()->stage != Operation::Stage::kCopying;
  };
  const auto ready = [&]() REQUIRES(queue_mutex_) { return closing_ || runtime_->failure.failed() || left_device(); };
  changed_.wait(lock, ready);
  if (runtime_->failure.failed() || !left_device()) return false;
  *operation = queue_.front();
  return true;
}

Status StagedRoute::await_host(Operation* operation) {
  HostError error;
  const HostApi& host = runtime_->host;
  const int code = host.wait(host.client, operation->host_ticket, -1, &Failure::interrupts, &runtime_->failure, &error);
  return runtime_->host_status(code, error);
}

void StagedRoute::serve() {
  Operation* operation = nullptr;
  while (next(&operation)) {
    if (Status status = await_host(operation); !status) {
      runtime_->failure.fail(status.message());
      break;
    }
    runtime_->slots.free_one();
    release(operation);
  }
}

// Retires operations whose results are in place. After a failure it retires none: released work may still write.
void StagedRoute::reap() {
  if (!reaping_.try_lock()) return;
  const Lock alone(reaping_, std::adopt_lock);
  while (!runtime_->failure.failed()) {
    Operation* operation = nullptr;
    {
      const Lock lock(queue_mutex_);
      if (landing_.empty()) return;
      operation = landing_.front();
    }
    const CudaError code = runtime_->libraries.cuda.event_query(operation->end);
    if (code == kCudaNotReady) return;
    if (Status status = runtime_->cuda(code, "an operation on the device"); !status) {
      runtime_->failure.fail(status.message());
      return;
    }
    operation->seen_done(now_ns());
    {
      const Lock lock(queue_mutex_);
      landing_.pop_front();
    }
    retire(operation);
  }
}

void StagedRoute::retire(Operation* operation) {
  runtime_->put_pinned(operation->memory);
  operation->memory = {};
  retire_(operation);
}

void StagedRoute::wait_empty() {
  Lock lock(queue_mutex_);
  changed_.wait(lock, [this]() REQUIRES(queue_mutex_) { return queue_.empty() || runtime_->failure.failed(); });
}

bool StagedRoute::empty() {
  const Lock lock(queue_mutex_);
  return queue_.empty();
}

// Only tells how long: the daemon knows which ranks are missing.
Waiting StagedRoute::look() {
  const Lock lock(queue_mutex_);
  Waiting found;
  for (const Operation* operation : queue_) {
    const int64_t awaited = operation->awaited_ns.load(std::memory_order_relaxed);
    if (awaited == 0 || operation->stage != Operation::Stage::kAtHost) continue;
    const int64_t since = std::max({awaited, operation->started_ns.load(std::memory_order_relaxed), progress_ns_});
    if (found.since_ns == 0 || since < found.since_ns) found.since_ns = since;
  }
  return found;
}

bool StagedRoute::drained() {
  const CudaRuntime& cuda = runtime_->libraries.cuda;
  const int64_t deadline = now_ns() + kDrainNs;
  for (CudaStream stream : {out_, in_}) {
    while (stream != nullptr && cuda.stream_query(stream) == kCudaNotReady) {
      if (now_ns() > deadline) return false;
      poll(nullptr, 0, 1);  // CUDA has no wait with a deadline, so this polls, so this polls
    }
  }
  return true;
}

bool StagedRoute::close() {
  if (thread_.joinable()) {
    {
      const Lock lock(queue_mutex_);
      closing_ = true;
      changed_.notify_all();
    }
    thread_.join();
  }
  if (listener_ != 0) runtime_->failure.forget(listener_);
  if (wait_id_ != 0) runtime_->wait_clock.remove(wait_id_);
  if (poll_id_ != 0 && !runtime_->poller.remove(poll_id_)) return false;
  if (!drained()) return false;
  runtime_->slots.forget(this);
  std::deque<Operation*> left;
  {
    const Lock lock(queue_mutex_);
    left.swap(landing_);
    left.insert(left.end(), queue_.begin(), queue_.end());
    queue_.clear();
  }
  for (Operation* operation : left) retire(operation);
  runtime_->put_pinned(word_memory_);
  word_memory_ = {};
  return true;
}

}  // namespace bagua::device
