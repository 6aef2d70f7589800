#include "nccl_net/helpers.h"

#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "base/text.h"
#include "nccl_net/connection.h"
#include "nccl_net/log.h"
#include "nccl_net/settings.h"

namespace bagua::nccl_net {
namespace {

// A connection without work and events is watched for this long.
constexpr int kIdleMs = 20;

}  // namespace

Status Helper::start() {
  epoll_.reset(::epoll_create1(EPOLL_CLOEXEC));
  if (!epoll_.valid()) return {Code::kResource, "epoll_create1: " + errno_text(errno)};
  if (Status status = wake_.open(); !status) return status;
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.ptr = this;  // marks the wake-up event; a connection's events carry the connection's address
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.fd(), &event) != 0) {
    return {Code::kResource, "epoll_ctl: " + errno_text(errno)};
  }
  // The program's own threads handle signals.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  Status status;
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& error) {
    status = {Code::kResource, std::string("can't start a thread: ") + error.what()};
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return status;
}

Helper::~Helper() {
  if (!thread_.joinable()) return;
  {
    const Lock lock(mutex_);
    stop_ = true;
  }
  wake_.signal();
  thread_.join();
}

void Helper::wake(Connection* connection) {
  const Lock lock(mutex_);
  ++calls_;
  if (std::find(active_.begin(), active_.end(), connection) == active_.end()) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.ptr = connection;
    if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, connection->epoll_fd(), &event) != 0)
      return;  // then the connection works without a helper
    active_.push_back(connection);
  }
  if (asleep_) {
    asleep_ = false;
    wake_.signal();
  }
}

void Helper::remove(Connection* connection) {
  Lock lock(mutex_);
  const auto found = std::find(active_.begin(), active_.end(), connection);
  if (found != active_.end()) {
    active_.erase(found);
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, connection->epoll_fd(), nullptr);
  }
  served_.wait(lock, [&]() REQUIRES(mutex_) { return serving_ != connection; });
}

void Helper::run() {
  ::pthread_setname_np(::pthread_self(), "bagua-net");
  for (;;) {
    uint64_t seen = 0;
    {
      const Lock lock(mutex_);
      if (stop_) return;
      seen = calls_;
    }
    if (!serve_all()) sleep(seen);
  }
}

bool Helper::serve_all() {
  bool moved = false;
  for (size_t i = 0;; ++i) {
    Connection* connection = nullptr;
    {
      const Lock lock(mutex_);
      if (i >= active_.size()) return moved;
      connection = serving_ = active_[i];
    }
    moved = connection->pump() || moved;
    {
      const Lock lock(mutex_);
      serving_ = nullptr;
    }
    served_.notify_all();
  }
}

void Helper::sleep(uint64_t seen) {
  bool idle = false;
  {
    const Lock lock(mutex_);
    if (stop_ || calls_ != seen) return;  // wake() was called since the last check
    asleep_ = true;
    idle = active_.empty();
  }
  epoll_event events[16];
  const int count = ::epoll_wait(epoll_.get(), events, 16, idle ? -1 : kIdleMs);
  for (int i = 0; i < count; ++i) {
    if (events[i].data.ptr == this) wake_.drain();
  }
  const Lock lock(mutex_);
  asleep_ = false;
  drop_idle();  // also after an event, because epoll would report an unwanted connection again and again
}

void Helper::drop_idle() {
  for (size_t i = active_.size(); i-- > 0;) {
    if (active_[i]->wants_help()) continue;
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, active_[i]->epoll_fd(), nullptr);
    active_.erase(active_.begin() + static_cast<ptrdiff_t>(i));
  }
}

Helpers& Helpers::instance() {
  static auto* const instance = new Helpers;  // never destroyed: NCCL may close connections while the process exits
  return *instance;
}

Helper* Helpers::join() {
  const Lock lock(mutex_);
  const auto wanted = static_cast<size_t>(settings().threads);
  while (threads_.size() < wanted) {
    auto helper = std::make_unique<Helper>();
    if (Status status = helper->start(); !status) {
      BAGUA_NET_WARN("goes on with " + std::to_string(threads_.size()) + " helpers: " + status.message());
      break;
    }
    threads_.push_back(std::move(helper));
  }
  if (threads_.empty()) return nullptr;
  ++members_;
  return threads_[next_++ % threads_.size()].get();
}

void Helpers::leave(Helper* helper, Connection* connection) {
  const Lock lock(mutex_);
  helper->remove(connection);
  if (--members_ == 0) threads_.clear();
}

}  // namespace bagua::nccl_net
