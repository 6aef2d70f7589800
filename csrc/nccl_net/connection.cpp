#include "nccl_net/connection.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>
#include <iterator>

#include "base/clock.h"
#include "base/text.h"
#include "nccl_net/helpers.h"
#include "nccl_net/log.h"
#include "nccl_net/settings.h"

namespace bagua::nccl_net {
namespace {

constexpr uint64_t kControlEvent = UINT64_MAX;

Status add(const Fd& epoll, int fd, uint32_t events, uint64_t tag) {
  epoll_event event{};
  event.events = events | EPOLLET | EPOLLRDHUP;
  event.data.u64 = tag;
  if (::epoll_ctl(epoll.get(), EPOLL_CTL_ADD, fd, &event) == 0) return Status::ok();
  return {Code::kResource, "epoll_ctl: " + errno_text(errno)};
}

}  // namespace

Connection::Connection(const char* direction, std::string peer)
    : peer_(std::move(peer)), direction_(direction), opened_ns_(now_ns()) {
  for (Request& slot : slots_) slot.owner = this;
}

Connection::~Connection() = default;

void Connection::add_stream(Stream* stream, Fd socket) {
  stream->socket = std::move(socket);
  streams_.push_back(stream);
  stream->number = streams_.size();
}

Status Connection::watch(const Fd& control, uint32_t control_events, uint32_t events) {
  Fd epoll(::epoll_create1(EPOLL_CLOEXEC));
  if (!epoll.valid()) return {Code::kResource, "epoll_create1: " + errno_text(errno)};
  if (Status status = add(epoll, control.get(), control_events, kControlEvent); !status) return status;
  for (size_t i = 0; i < streams_.size(); ++i) {
    if (Status status = add(epoll, streams_[i]->socket.get(), events, i); !status) return status;
  }
  epoll_ = std::move(epoll);
  return Status::ok();
}

Result Connection::test(Request* request, int* done, int* sizes) {
  *done = 0;
  if (!request->complete()) {
    if (failure() == kSuccess) progress();
    if (!request->complete()) {
      const std::string reason = failure() == kSuccess ? hopeless(*request) : "";
      if (!reason.empty()) fail(kRemoteError, "message " + std::to_string(request->message) + ": " + reason);
      if (failure() != kSuccess) failed();
      return failure();
    }
  }
  *done = 1;
  if (sizes != nullptr) *sizes = static_cast<int>(std::min<uint64_t>(request->total, INT_MAX));
  const Lock lock(mutex_);
  request->used = false;
  return kSuccess;
}

Request* Connection::take_slot(void* data, size_t size) {
  for (size_t i = 0; i < kMaxRequests; ++i) {
    Request& slot = slots_[(next_message_ + i) % kMaxRequests];
    if (slot.used) continue;
    slot.data = static_cast<char*>(data);
    slot.capacity = size;
    slot.total = 0;
    slot.sized = false;
    slot.begun = 0;
    return &slot;
  }
  return nullptr;
}

Request* Connection::slot_of(uint64_t message) {
  for (size_t i = 0; i < kMaxRequests; ++i) {
    Request& slot = slots_[(message + i) % kMaxRequests];
    if (slot.used && slot.message == message) return &slot;
  }
  return nullptr;
}

Result Connection::fail(Result result, const std::string& what) {
  const Lock lock(failure_mutex_);
  if (failure() == kSuccess) {  // logs before any thread can see the error
    BAGUA_NET_WARN(std::string(direction_) + " " + peer_ + ": " + what);
    failure_.store(result, std::memory_order_release);
  }
  return failure();
}

// Does not log: when NCCL aborts it frees buffers with requests in flight, and closes connections afterwards.
void Connection::withdraw(const char* data, size_t size) {
  {
    const Lock lock(mutex_);
    const auto uses = [&](const Request& slot) {
      return slot.used && !slot.complete() && slot.data < data + size && data < slot.data + slot.capacity;
    };
    if (std::none_of(std::begin(slots_), std::end(slots_), uses)) return;
  }
  {
    const Lock lock(failure_mutex_);
    if (failure() == kSuccess) failure_.store(kInternalError, std::memory_order_release);
  }
  if (helper_ != nullptr)
    Helpers::instance().leave(helper_, this);  // it stops at its next step, because the connection has failed
  helper_ = nullptr;
}

bool Connection::look() {
  constexpr int kEvents = kMaxStreams + 1;
  epoll_event events[kEvents];
  const int count = ::epoll_wait(epoll_.get(), events, kEvents, 0);
  bool any = false;
  for (int i = 0; i < count; ++i) {
    const bool hung_up = (events[i].events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0;
    if (events[i].data.u64 == kControlEvent) {
      if (hung_up) control_hung_up_.store(true, std::memory_order_relaxed);
      control_ready_.store(true, std::memory_order_release);
      any = true;
      continue;
    }
    Stream& stream = *streams_[events[i].data.u64];
    if (hung_up) stream.hung_up.store(true, std::memory_order_relaxed);
    stream.ready.store(true, std::memory_order_release);
    any = true;
  }
  return any;
}

bool Connection::wants_help() const {
  return outstanding_.load(std::memory_order_relaxed) > 0 && failure() == kSuccess;
}

void Connection::call_helper() {
  const Settings& set = settings();
  if (set.threads == 0 || outstanding_.load(std::memory_order_relaxed) < static_cast<int64_t>(set.help_bytes)) return;
  if (!asked_for_helper_) {
    asked_for_helper_ = true;
    if (const Status status = watch_for_helper(); !status) {
      BAGUA_NET_WARN(std::string(direction_) + " " + peer_ + " goes on without a helper: " + status.message());
      return;
    }
    helper_ = Helpers::instance().join();
  }
  if (helper_ != nullptr) helper_->wake(this);
}

void Connection::close() {
  if (closed_) return;
  closed_ = true;
  if (helper_ != nullptr) Helpers::instance().leave(helper_, this);
  if (!settings().stats.empty()) write_stats();
}

// Appends one line of JSON by one write.
void Connection::write_stats() {
  uint64_t messages = 0, data = 0, stalls = 0;
  {
    const Lock lock(mutex_);
    messages = next_message_;
  }
  std::string each;
  for (const Stream* stream : streams_) {
    const uint64_t bytes = stream->bytes.load();
    each += (each.empty() ? "" : ", ") + std::to_string(bytes);
    data += bytes;
    stalls += stream->stalls.load();
  }
  char seconds[32];
  std::snprintf(seconds, sizeof seconds, "%.6f", static_cast<double>(now_ns() - opened_ns_) / 1e9);
  const std::string line = "{\"pid\": " + std::to_string(::getpid()) + ", \"direction\": \"" +
                           (std::strncmp(direction_, "send", 4) == 0 ? "send" : "receive") + "\", \"peer\": \"" +
                           peer_ + "\", \"seconds\": " + seconds + ", \"messages\": " + std::to_string(messages) +
                           ", \"bytes\": " + std::to_string(data + inline_bytes_) +
                           ", \"inline_bytes\": " + std::to_string(inline_bytes_) + ", \"stream_bytes\": [" + each +
                           "], \"stalls\": " + std::to_string(stalls) +
                           ", \"failed\": " + (failure() != kSuccess ? "true" : "false") + "}\n";
  const std::string& where = settings().stats;
  const Fd file(where == "1" ? ::dup(STDERR_FILENO)
                             : ::open(where.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
  if (!file.valid() || ::write(file.get(), line.data(), line.size()) < 0) {
    BAGUA_NET_WARN("can't write BAGUA_NET_STATS='" + where + "': " + errno_text(errno));
  }
}

}  // namespace bagua::nccl_net
