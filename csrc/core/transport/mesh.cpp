#include "transport/mesh.h"

#include <algorithm>
#include <atomic>
#include <iterator>
#include <utility>

#include "base/clock.h"
#include "base/text.h"
#include "transport/mesh_parts.h"

namespace bagua {

using mesh::Peer;
using mesh::Stream;

// Holds the parts of a mesh, and runs the loop that calls them.
struct Mesh::Impl {
  explicit Impl(MeshOptions given)
      : shared(std::move(given)),
        poller(&shared),
        losses(&shared, &poller),
        outbox(&shared, &poller, &losses),
        connections(&shared, &poller, &outbox),
        intake(&shared, &poller, &losses, &outbox),
        watch(&shared, &poller, &losses, &outbox),
        ending(&shared, &poller, &connections, &watch) {}

  bool check_peer(int peer, size_t bytes, size_t limit, const char* what);
  // Waits for events and handles them. Returns false if wake() was called.
  bool wait(int64_t deadline_ns);
  void on_event(Stream* stream, uint32_t events);
  int64_t next_deadline(int64_t deadline_ns) const;
  // Handles streams that have ended since the last call.
  void settle();

  mesh::Shared shared;
  mesh::Poller poller;
  mesh::Losses losses;
  mesh::Outbox outbox;
  mesh::Connections connections;
  mesh::Intake intake;
  mesh::Watch watch;
  mesh::Ending ending;
  std::atomic<bool> woken{false};
};

bool Mesh::Impl::check_peer(int peer, size_t bytes, size_t limit, const char* what) {
  if (!shared.status) return false;
  if (peer < 0 || peer >= shared.options.hosts || peer == shared.options.host) {
    shared.fail({Code::kInvalid, std::string(what) + " names host " + std::to_string(peer) +
                                     ", which is no other host of " + std::to_string(shared.options.hosts)});
    return false;
  }
  if (bytes > limit) {
    shared.fail({Code::kInvalid, std::string(what) + " of " + std::to_string(bytes) + " bytes with " +
                                     shared.name(peer) + ": at most " + std::to_string(limit) + " are allowed"});
    return false;
  }
  return true;
}

void Mesh::Impl::on_event(Stream* stream, uint32_t events) {
  if ((events & EPOLLOUT) != 0) outbox.on_writable(stream);
  if ((events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) == 0 || !stream->registered) return;
  stream->reader.readable();
  if (!stream->parked) return intake.read(stream);
  if ((events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) {
    losses.lose(stream, "it closed the connection");
  } else {
    poller.watch(stream, stream->events & ~uint32_t{EPOLLIN});  // watched again when its receive is posted
  }
}

int64_t Mesh::Impl::next_deadline(int64_t deadline_ns) const {
  for (const int64_t at : {losses.deadline(), watch.deadline(), connections.deadline()}) {
    if (at >= 0 && (deadline_ns < 0 || at < deadline_ns)) deadline_ns = at;
  }
  return deadline_ns;
}

bool Mesh::Impl::wait(int64_t deadline_ns) {
  epoll_event events[mesh::Poller::kEvents];
  const bool busy = !shared.done.empty() || poller.any_ready() || outbox.has_more() || !shared.status;
  const int count = poller.wait(busy ? 0 : timeout_ms(next_deadline(deadline_ns)), events);
  for (int i = 0; i < count && shared.status; ++i) {
    if (events[i].data.ptr != nullptr) on_event(static_cast<Stream*>(events[i].data.ptr), events[i].events);
  }
  connections.adopt();
  outbox.pump_again();
  for (Stream* stream : poller.take_ready()) {
    stream->queued = false;
    if (!stream->parked) intake.read(stream);
  }
  return !woken.exchange(false, std::memory_order_acq_rel);
}

void Mesh::Impl::settle() {
  ending.settle();
  losses.settle();
}

Mesh::Mesh(MeshOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {}
Mesh::~Mesh() = default;

void Mesh::attach(int peer, int stream, Connection connection) {
  impl_->connections.attach(peer, stream, std::move(connection));
}

bool Mesh::connected() const {
  impl_->connections.adopt();
  return impl_->connections.complete();
}

void Mesh::need_all() {
  for (int peer = 0; peer < impl_->shared.options.hosts; ++peer) {
    if (peer != impl_->shared.options.host) impl_->connections.need(&impl_->shared.peer(peer));
  }
}

void Mesh::send(int peer, uint64_t op, uint64_t tag, const void* data, size_t bytes, uint64_t cookie) {
  if (!impl_->check_peer(peer, bytes, kMaxMessage, "a message")) return;
  Peer& to = impl_->shared.peer(peer);
  impl_->connections.need(&to);
  impl_->outbox.post(&to, {FrameType::kData, op, tag, data, bytes, cookie, now_ns(), {}});
}

void Mesh::recv(int peer, uint64_t op, uint64_t tag, void* data, size_t bytes, uint64_t cookie) {
  if (!impl_->check_peer(peer, bytes, kMaxMessage, "a receive")) return;
  impl_->connections.need(&impl_->shared.peer(peer));
  impl_->intake.post(peer, {op, tag}, {data, bytes, cookie, now_ns(), false});
}

void Mesh::send_control(int peer, const std::string& text) {
  if (!impl_->check_peer(peer, text.size(), kMaxControl, "a control message")) return;
  impl_->outbox.post(&impl_->shared.peer(peer), {FrameType::kControl, 0, 0, nullptr, 0, 0, now_ns(), text});
}

void Mesh::let_go(int peer) {
  impl_->shared.peer(peer).let_go = true;
}

void Mesh::set_silence_timeout(int64_t ns) {
  impl_->shared.options.silence_timeout_ns = ns;
}

void Mesh::set_first_word_timeout(int64_t ns) {
  impl_->shared.options.first_word_timeout_ns = ns;
}

void Mesh::set_waiting(bool waiting) {
  impl_->watch.set_waiting(waiting);
}

void Mesh::set_awaited(const std::vector<bool>& peers) {
  for (size_t i = 0; i < impl_->shared.peers.size(); ++i) impl_->shared.peers[i].awaited = peers[i];
}

Status Mesh::poll(int64_t deadline_ns, std::vector<Completion>* out) {
  mesh::Shared& shared = impl_->shared;
  impl_->connections.adopt();
  impl_->settle();  // a new receive from a lost peer may be impossible now
  for (;;) {
    const bool undisturbed = impl_->wait(deadline_ns);
    impl_->settle();
    if (shared.status) impl_->watch.look();
    if (shared.status) {
      int peer = -1;
      if (Status late = impl_->connections.overdue(now_ns(), &peer); !late) shared.fail(std::move(late), peer);
    }
    if (!shared.done.empty()) {
      std::move(shared.done.begin(), shared.done.end(), std::back_inserter(*out));
      shared.done.clear();
      return Status::ok();
    }
    if (!shared.status) return shared.status;
    if (!undisturbed || (deadline_ns >= 0 && now_ns() >= deadline_ns)) return Status::ok();
  }
}

void Mesh::wake() {
  impl_->woken.store(true, std::memory_order_release);
  impl_->poller.signal();
}

int Mesh::failed_peer() const {
  return impl_->shared.failed_peer;
}

void Mesh::retire() {
  impl_->ending.retire();
}

void Mesh::hang_up() {
  impl_->ending.hang_up();
}

bool Mesh::can_tell(int peer) const {
  return mesh::can_tell(impl_->shared.peer(peer));
}

void Mesh::shut_down() {
  impl_->ending.shut_down();
}

const Mesh::Counters& Mesh::counters() const {
  return impl_->shared.totals;
}

namespace {

struct Sends {
  size_t count = 0;
  int64_t since_ns = 0;  // when the oldest was queued
};

// Counts messages to a peer that are queued or partly written.
Sends outstanding_sends(const Peer& peer, int64_t now) {
  Sends sends{peer.data.size() + peer.control.size(), now};
  for (const auto* queue : {&peer.control, &peer.data}) {
    if (!queue->empty()) sends.since_ns = std::min(sends.since_ns, queue->front().since_ns);
  }
  for (const auto& stream : peer.streams) {
    if (stream == nullptr || !stream->writer.busy()) continue;
    ++sends.count;
    sends.since_ns = std::min(sends.since_ns, stream->writer.current().since_ns);
  }
  return sends;
}

}  // namespace

std::string Mesh::describe_waits(int64_t now) const {
  std::string text;
  const int streams = impl_->shared.options.streams;
  for (size_t i = 0; i < impl_->shared.peers.size(); ++i) {
    const Peer& peer = impl_->shared.peers[i];
    const Sends sends = outstanding_sends(peer, now);
    int64_t since = sends.since_ns;
    for (const auto& [key, posted] : peer.posted) since = std::min(since, posted.since_ns);
    const bool silent = peer.ping_ns >= 0 && now - peer.ping_ns >= mesh::Watch::kPingAfterNs;
    if (sends.count == 0 && peer.posted.empty() && !silent) continue;
    if (!text.empty()) text += "; ";
    text += impl_->shared.name(static_cast<int>(i)) + ": " + std::to_string(peer.posted.size()) + " receives and " +
            std::to_string(sends.count) + " sends outstanding for " + duration_text(now - since);
    if (silent) text += ", has not answered for " + duration_text(now - impl_->watch.quiet_since(peer));
    if (peer.attached < streams) {
      text += ", " + std::to_string(peer.attached) + " of " + std::to_string(streams) + " streams connected";
    }
  }
  return text;
}

}  // namespace bagua
