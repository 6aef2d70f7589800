#include "transport/mesh.h"

#include <algorithm>
#include <iterator>

#include "base/clock.h"
#include "base/text.h"

namespace bagua {

using mesh::Peer;
using mesh::Stream;

Mesh::Mesh(MeshOptions options)
    : shared_(std::move(options)),
      poller_(&shared_),
      losses_(&shared_, &poller_),
      outbox_(&shared_, &poller_, &losses_),
      connections_(&shared_, &poller_, &outbox_),
      intake_(&shared_, &poller_, &losses_, &outbox_),
      watch_(&shared_, &poller_, &losses_, &outbox_),
      ending_(&shared_, &poller_, &connections_, &watch_) {}

bool Mesh::check_peer(int peer, size_t bytes, size_t limit, const char* what) {
  if (!shared_.status) return false;
  if (peer < 0 || peer >= shared_.options.hosts || peer == shared_.options.host) {
    shared_.fail({Code::kInvalid, std::string(what) + " names host " + std::to_string(peer) +
                                      ", which is no other host of " + std::to_string(shared_.options.hosts)});
    return false;
  }
  if (bytes > limit) {
    shared_.fail({Code::kInvalid, std::string(what) + " of " + std::to_string(bytes) + " bytes with " +
                                      shared_.name(peer) + ": at most " + std::to_string(limit) + " are allowed"});
    return false;
  }
  return true;
}

void Mesh::on_event(Stream* stream, uint32_t events) {
  if ((events & EPOLLOUT) != 0) outbox_.on_writable(stream);
  if ((events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) == 0 || !stream->registered) return;
  stream->reader.readable();
  if (!stream->parked) return intake_.read(stream);
  if ((events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) {
    losses_.lose(stream, "it closed the connection");
  } else {
    poller_.watch(stream, stream->events & ~uint32_t{EPOLLIN});  // watched again when its receive is posted
  }
}

int64_t Mesh::next_deadline(int64_t deadline_ns) const {
  for (const int64_t at : {losses_.deadline(), watch_.deadline(), connections_.deadline()}) {
    if (at >= 0 && (deadline_ns < 0 || at < deadline_ns)) deadline_ns = at;
  }
  return deadline_ns;
}

bool Mesh::wait(int64_t deadline_ns) {
  epoll_event events[mesh::Poller::kEvents];
  const bool busy = !shared_.done.empty() || poller_.any_ready() || outbox_.has_more() || !shared_.status;
  const int count = poller_.wait(busy ? 0 : timeout_ms(next_deadline(deadline_ns)), events);
  for (int i = 0; i < count && shared_.status; ++i) {
    if (events[i].data.ptr != nullptr) on_event(static_cast<Stream*>(events[i].data.ptr), events[i].events);
  }
  connections_.adopt();
  outbox_.pump_again();
  for (Stream* stream : poller_.take_ready()) {
    stream->queued = false;
    if (!stream->parked) intake_.read(stream);
  }
  return !woken_.exchange(false, std::memory_order_acq_rel);
}

void Mesh::settle() {
  ending_.settle();
  losses_.settle();
}

void Mesh::need_all(int first) {
  for (int peer = first; peer < shared_.options.hosts; ++peer) {
    if (peer != shared_.options.host) connections_.need(&shared_.peer(peer));
  }
}

void Mesh::send(int peer, uint64_t op, uint64_t tag, const void* data, size_t bytes, uint64_t cookie) {
  if (!check_peer(peer, bytes, kMaxMessage, "a message")) return;
  Peer& to = shared_.peer(peer);
  connections_.need(&to);
  outbox_.post(&to, {FrameType::kData, op, tag, data, bytes, cookie, now_ns(), {}});
}

void Mesh::recv(int peer, uint64_t op, uint64_t tag, void* data, size_t bytes, uint64_t cookie) {
  if (!check_peer(peer, bytes, kMaxMessage, "a receive")) return;
  connections_.need(&shared_.peer(peer));
  intake_.post(peer, {op, tag}, {data, bytes, cookie, now_ns(), false});
}

void Mesh::send_control(int peer, const std::string& text) {
  if (!check_peer(peer, text.size(), kMaxControl, "a control message")) return;
  outbox_.post(&shared_.peer(peer), {FrameType::kControl, 0, 0, nullptr, 0, 0, now_ns(), text});
}

void Mesh::set_awaited(const std::vector<bool>& peers) {
  for (size_t i = 0; i < shared_.peers.size(); ++i) shared_.peers[i].awaited = peers[i];
}

Status Mesh::poll(int64_t deadline_ns, std::vector<Completion>* out) {
  connections_.adopt();
  settle();  // a new receive from a lost peer may be impossible now
  for (;;) {
    const bool undisturbed = wait(deadline_ns);
    settle();
    if (shared_.status) watch_.look();
    if (shared_.status) {
      int peer = -1;
      if (Status late = connections_.overdue(now_ns(), &peer); !late) shared_.fail(std::move(late), peer);
    }
    if (!shared_.done.empty()) {
      std::move(shared_.done.begin(), shared_.done.end(), std::back_inserter(*out));
      shared_.done.clear();
      return Status::ok();
    }
    if (!shared_.status) return shared_.status;
    if (!undisturbed || (deadline_ns >= 0 && now_ns() >= deadline_ns)) return Status::ok();
  }
}

std::vector<int> Mesh::suspects(int64_t now) const {
  std::vector<int> found;
  for (int index = 0; index < shared_.options.hosts; ++index) {
    const Peer& peer = shared_.peers[static_cast<size_t>(index)];
    const bool suspect = index == shared_.failed_peer || watch_.doubts(peer, now) || connections_.doubts(peer, now);
    if (suspect) found.push_back(index);
  }
  return found;
}

void Mesh::wake() {
  woken_.store(true, std::memory_order_release);
  poller_.signal();
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
  const int streams = shared_.options.streams;
  for (size_t i = 0; i < shared_.peers.size(); ++i) {
    const Peer& peer = shared_.peers[i];
    const Sends sends = outstanding_sends(peer, now);
    int64_t since = sends.since_ns;
    for (const auto& [key, posted] : peer.posted) since = std::min(since, posted.since_ns);
    const bool silent = peer.ping_ns >= 0 && now - peer.ping_ns >= mesh::Watch::kPingAfterNs;
    if (sends.count == 0 && peer.posted.empty() && !silent) continue;
    if (!text.empty()) text += "; ";
    text += shared_.name(static_cast<int>(i)) + ": " + std::to_string(peer.posted.size()) + " receives and " +
            std::to_string(sends.count) + " sends outstanding for " + duration_text(now - since);
    if (silent) text += ", has not answered for " + duration_text(now - watch_.quiet_since(peer));
    if (peer.attached < streams) {
      text += ", " + std::to_string(peer.attached) + " of " + std::to_string(streams) + " streams connected";
    }
  }
  return text;
}

}  // namespace bagua
