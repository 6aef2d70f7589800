#include "gpu/leg/runtime.h"

#include <algorithm>

#include "base/clock.h"

namespace bagua::device {

namespace {

constexpr uint64_t kSmallest = 64 << 10, kStep = 1 << 20;  // bytes of pinned memory

// Rounds sizes up to few different ones, so that buffers can be reused.
uint64_t rounded(uint64_t bytes) {
  if (bytes > kStep) return (bytes + kStep - 1) / kStep * kStep;
  uint64_t size = kSmallest;
  while (size < bytes) size *= 2;
  return size;
}

}  // namespace

bool Failure::fail(const std::string& reason) {
  const Lock lock(mutex_);
  if (failed_.load(std::memory_order_relaxed)) return false;
  reason_ = reason;
  failed_.store(true, std::memory_order_release);
  for (const auto& [id, listener] : listeners_) listener();
  return true;
}

std::string Failure::reason() const {
  const Lock lock(mutex_);
  return reason_;
}

uint64_t Failure::listen(std::function<void()> listener) {
  const Lock lock(mutex_);
  if (failed_.load(std::memory_order_relaxed)) listener();
  listeners_.emplace_back(next_, std::move(listener));
  return next_++;
}

void Failure::forget(uint64_t listener) {
  const Lock lock(mutex_);
  const auto is_it = [listener](const auto& entry) { return entry.first == listener; };
  listeners_.erase(std::remove_if(listeners_.begin(), listeners_.end(), is_it), listeners_.end());
}

Runtime::Runtime(const HostApi& host_api, int ordinal, const std::string& kernels)
    : host(host_api), device(ordinal), libraries(open_libraries(kernels)) {}

Runtime::~Runtime() {
  if (!libraries.has_cuda()) return;
  give_back();
  if (context_ != nullptr) libraries.driver.release(handle_);
}

void Runtime::give_back() {
  OnDevice here(*this);
  const Lock lock(mutex_);
  for (CudaEvent event : events_) libraries.cuda.event_destroy(event);
  for (const Spare& spare : spares_) libraries.cuda.release(spare.data);
  HostError ignored;  // an error only means that the daemon and the memory are gone
  const Lock made_lock(made_mutex_);
  for (const Pinned& memory : made_) {
    libraries.cuda.host_unregister(memory.data);
    static_cast<void>(host.free(host.client, memory.segment, &ignored));
  }
}

Status Runtime::open() {
  if (host.version != kHostApiVersion) {
    return {Code::kInvalid, "the core and the GPU leg are of different versions: start again, both are built anew"};
  }
  if (!libraries.has_cuda()) {
    return {Code::kUnavailable, "the CUDA runtime can't be used: " + libraries.why_not.at("cudart") +
                                    ". BAGUA_DEVICE_CUDART names the file (libcudart.so.12 or .13) if it is elsewhere"};
  }
  if (Status status = retain(); !status) return status;
  OnDevice here(*this);
  if (!here.status()) return here.status();
  if (Status status = cuda(libraries.cuda.priority_range(&least_, &greatest_), "asking for stream priorities");
      !status) {
    return status;
  }
  if (Status status = try_wait_value(); !status) no_wait_value_ = status.message();
  load_kernels();
  return Status::ok();
}

// Loads the kernels while the device is idle: a first launch may wait for all work of the device, which may wait for
// other ranks.
void Runtime::load_kernels() {
  if (!libraries.has_kernels()) return;
  const CudaError code = libraries.kernels.load();
  if (code == kCudaOk) return;
  libraries.give_up_kernels(
      "can't run on GPU " + std::to_string(device) + ": CUDA error " + std::to_string(code) + ", " +
      libraries.cuda.error_text(code) +
      ". It wants architecture 8.0 or newer (BAGUA_CUDA_ARCHS names others of them), and a driver "
      "whose CUDA is not older than the nvcc that compiled it");
}

// Retains the primary context of the device, which the CUDA runtime uses, too.
Status Runtime::retain() {
  const CudaDriver& driver = libraries.driver;
  if (!libraries.has_wait_value()) return Status::ok();
  CudaContext made = nullptr;
  Status status = cuda(driver.init(0), "opening the driver");
  if (status) status = cuda(driver.device(&handle_, device), "looking for the device");
  if (status) status = cuda(driver.retain(&made, handle_), "making a context");
  if (status) context_ = made;
  return status;
}

// Tries a wait whose condition is true already: there is no other way to learn whether driver and device support waits.
Status Runtime::try_wait_value() {
  if (!libraries.has_wait_value()) return {Code::kUnavailable, libraries.why_not.at("driver")};
  CudaStream stream = nullptr;
  Pinned word;
  void* address = nullptr;
  Status status = make_stream(Traffic::kIn, &stream);
  if (status) status = take_pinned(sizeof(uint32_t), &word);
  if (status) status = cuda(libraries.cuda.host_address(&address, word.data, 0), "mapping memory");
  if (status) {
    *reinterpret_cast<uint32_t*>(word.data) = 1;
    const auto wait = libraries.driver.wait_value;
    status = cuda(wait(stream, reinterpret_cast<DriverAddress>(address), 1, kWaitValueGeq), "a wait on memory");
  }
  if (status) status = cuda(libraries.cuda.stream_synchronize(stream), "a wait on memory");
  if (stream != nullptr) libraries.cuda.stream_destroy(stream);
  put_pinned(word);
  return status;
}

Status Runtime::cuda(CudaError code, const char* what) const {
  if (code == kCudaOk) return Status::ok();
  return {Code::kUnavailable, "GPU " + std::to_string(device) + ": " + what + " failed: CUDA error " +
                                  std::to_string(code) + ", " + libraries.cuda.error_text(code)};
}

Status Runtime::nccl(NcclResult code, const char* what) const {
  if (goes_on(code)) return Status::ok();
  const char* const more = libraries.nccl.last_error(nullptr);
  const std::string words = more != nullptr && *more != '\0' ? std::string(": ") + more : "";
  return {Code::kUnavailable, std::string("NCCL: ") + what + " failed: " + libraries.nccl.error_text(code) + words +
                                  " (NCCL_DEBUG=INFO has more)"};
}

Status Runtime::host_status(int code, const HostError& error) const {
  if (code == kHostOk) return Status::ok();
  if (code == kHostInterrupted && failure.failed()) return failure.status();
  return {code == kHostTimeout ? Code::kTimeout : Code::kUnavailable, error.text};
}

void Runtime::fail_with_cause(const std::string& reason) {
  const int64_t deadline = now_ns() + kNsPerS;
  HostError error;
  int code = kHostOk;
  while (code == kHostOk && now_ns() < deadline) code = host.wait_failure(host.client, deadline, &error);
  failure.fail(code == kHostFailed ? error.text : reason);
}

Status Runtime::take_event(CudaEvent* out) {
  {
    const Lock lock(mutex_);
    if (!events_.empty()) {
      *out = events_.back();
      events_.pop_back();
      return Status::ok();
    }
  }
  return cuda(libraries.cuda.event_create(out, kEventDisableTiming | kEventBlockingSync), "making an event");
}

void Runtime::put_event(CudaEvent event) {
  if (event == nullptr) return;
  const Lock lock(mutex_);
  events_.push_back(event);
}

Status Runtime::make_stream(Traffic traffic, CudaStream* out) {
  // Counts from the highest priority down, and stays above that of the caller's streams if there are enough priorities.
  const int priority = std::min(greatest_ + static_cast<int>(traffic), std::max(greatest_, least_ - 1));
  return cuda(libraries.cuda.stream_create(out, kStreamNonBlocking, priority), "making a stream");
}

Status Runtime::take_pinned(uint64_t bytes, Pinned* out) {
  if (bytes == 0) return Status::ok();
  const uint64_t size = rounded(bytes);
  {
    const Lock lock(mutex_);
    auto best = idle_.end();
    for (auto it = idle_.begin(); it != idle_.end(); ++it) {
      if (it->bytes >= size && (best == idle_.end() || it->bytes < best->bytes)) best = it;
    }
    if (best != idle_.end() && best->bytes <= 4 * size) {
      *out = *best;
      idle_.erase(best);
      return Status::ok();
    }
  }
  counters.host_waits.fetch_add(1);
  HostError error;
  void* data = nullptr;
  Pinned made;
  if (Status status = host_status(host.alloc(host.client, size, &made.segment, &data, &made.bytes, &error), error);
      !status) {
    return status;
  }
  made.data = static_cast<char*>(data);
  const unsigned flags = kHostRegisterPortable | kHostRegisterMapped;
  if (Status status = cuda(libraries.cuda.host_register(data, made.bytes, flags), "pinning shared memory"); !status) {
    static_cast<void>(host.free(host.client, made.segment, &error));
    return status;
  }
  counters.pinned_bytes.fetch_add(made.bytes);
  const Lock lock(made_mutex_);
  made_.push_back(made);
  *out = made;
  return Status::ok();
}

void Runtime::put_pinned(Pinned memory) {
  if (memory.data == nullptr) return;
  const Lock lock(mutex_);
  idle_.push_back(memory);
}

Status Runtime::allocate(uint64_t bytes, void** out, std::atomic<uint64_t>* total) {
  {
    const Lock lock(mutex_);
    const auto fits = [bytes](const Spare& spare) { return bytes <= spare.bytes && spare.bytes / 4 <= bytes; };
    const auto found = std::find_if(spares_.begin(), spares_.end(), fits);
    if (found != spares_.end()) {
      *out = found->data;
      total->fetch_add(bytes);
      spares_.erase(found);
      return Status::ok();
    }
  }
  counters.host_waits.fetch_add(1);
  const std::string what = "allocating " + std::to_string(bytes) + " bytes";
  if (Status status = cuda(libraries.cuda.allocate(out, bytes), what.c_str()); !status) return status;
  total->fetch_add(bytes);
  return Status::ok();
}

void Runtime::keep(void* data, uint64_t bytes) {
  const Lock lock(mutex_);
  spares_.push_back({data, bytes});
}

OnDevice::OnDevice(const Runtime& runtime) : runtime_(runtime) {
  const CudaRuntime& cuda = runtime.libraries.cuda;
  if (runtime.context() != nullptr) {
    status_ = runtime.cuda(runtime.libraries.driver.push(runtime.context()), "choosing the device");
    pushed_ = status_.is_ok();
  } else {
    status_ = runtime.cuda(cuda.get_device(&before_), "asking for the current device");
    if (status_ && before_ != runtime.device) {
      status_ = runtime.cuda(cuda.set_device(runtime.device), "choosing the device");
    } else {
      before_ = -1;
    }
  }
  cuda.capture_mode(&mode_);
}

OnDevice::~OnDevice() {
  runtime_.libraries.cuda.capture_mode(&mode_);
  CudaContext ours = nullptr;
  if (pushed_) runtime_.libraries.driver.pop(&ours);
  if (before_ >= 0) runtime_.libraries.cuda.set_device(before_);
}

}  // namespace bagua::device
