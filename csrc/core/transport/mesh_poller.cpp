#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

#include "base/text.h"
#include "transport/mesh_parts.h"

namespace bagua::mesh {

namespace {

// An event for every packet would interrupt the ranks' computation thousands of times a second. One event for this many
// bytes does not, and comes early enough to keep TCP going.
constexpr size_t kMostLowWater = 64 << 10;

}  // namespace

Poller::Poller(Shared* shared) : shared_(shared) {
  epoll_.reset(::epoll_create1(EPOLL_CLOEXEC));
  if (!epoll_.valid()) shared_->fail({Code::kResource, "can't create an epoll descriptor: " + errno_text(errno)});
  if (Status opened = event_.open(); !opened) shared_->fail(std::move(opened));
  epoll_event watched{};
  watched.events = EPOLLIN;
  watched.data.ptr = nullptr;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, event_.fd(), &watched) != 0) {
    shared_->fail({Code::kResource, "can't watch an eventfd: " + errno_text(errno)});
  }
}

void Poller::watch(Stream* stream, uint32_t events) {
  if (stream->registered && stream->events == events) return;
  epoll_event watched{};
  watched.events = events;
  watched.data.ptr = stream;
  const int operation = stream->registered ? EPOLL_CTL_MOD : EPOLL_CTL_ADD;
  if (::epoll_ctl(epoll_.get(), operation, stream->socket.get(), &watched) != 0) {
    return shared_->fail({Code::kResource, "can't watch a connection: " + errno_text(errno)});
  }
  stream->registered = true;
  stream->events = events;
}

void Poller::unwatch(Stream* stream) {
  if (!stream->registered) return;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, stream->socket.get(), nullptr);
  stream->registered = false;
}

// A mark below the missing bytes is always right. With a larger one we would wait for bytes that may never come.
void Poller::set_low_water(Stream* stream) {
  const size_t wanted = std::min(stream->reader.missing(), kMostLowWater);
  if (wanted >= stream->low_water && wanted < 2 * stream->low_water) return;
  const int bytes = static_cast<int>(wanted);
  if (::setsockopt(stream->socket.get(), SOL_SOCKET, SO_RCVLOWAT, &bytes, sizeof bytes) == 0)
    stream->low_water = wanted;
}

int Poller::wait(int timeout_ms, epoll_event* events) {
  const int count = ::epoll_wait(epoll_.get(), events, kEvents, timeout_ms);
  if (count < 0 && errno != EINTR) shared_->fail({Code::kInternal, "epoll_wait: " + errno_text(errno)});
  for (int i = 0; i < count; ++i) {
    if (events[i].data.ptr == nullptr) event_.drain();
  }
  return count;
}

void Poller::make_ready(Stream* stream) {
  if (stream->queued || stream->ended) return;
  stream->queued = true;
  ready_.push_back(stream);
}

std::vector<Stream*> Poller::take_ready() {
  std::vector<Stream*> taken;
  taken.swap(ready_);
  return taken;
}

void Poller::forget_data() {
  ready_.erase(std::remove_if(ready_.begin(), ready_.end(), [](const Stream* stream) { return !stream->lane; }),
               ready_.end());
}

}  // namespace bagua::mesh
