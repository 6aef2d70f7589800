#include "transport/mesh.h"

#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <utility>

#include "base/text.h"
#include "transport/mesh_impl.h"

namespace bagua {

using mesh::Peer;
using mesh::Stream;

Mesh::Impl::Impl(MeshOptions given) : options(std::move(given)), peers(static_cast<size_t>(options.hosts)) {
  for (Peer& peer : peers) peer.streams.resize(static_cast<size_t>(options.streams) + 1);
  for (size_t i = 0; i < std::min(options.verdicts.size(), peers.size()); ++i) {
    peers[i].stream_count.share(options.verdicts[i]);
  }
  missing = (options.hosts - 1) * options.streams;
  epoll.reset(::epoll_create1(EPOLL_CLOEXEC));
  if (!epoll.valid()) fail({Code::kResource, "can't create an epoll descriptor: " + errno_text(errno)});
  if (Status opened = event.open(); !opened) fail(std::move(opened));
  epoll_event watched{};
  watched.events = EPOLLIN;
  watched.data.ptr = nullptr;
  if (::epoll_ctl(epoll.get(), EPOLL_CTL_ADD, event.fd(), &watched) != 0) {
    fail({Code::kResource, "can't watch an eventfd: " + errno_text(errno)});
  }
}

// ---- attaching

void Mesh::Impl::adopt() {
  if (!any_attached.load(std::memory_order_acquire)) return;
  std::vector<Attached> taken;
  {
    std::lock_guard<std::mutex> lock(mutex);
    taken.swap(attached);
    any_attached.store(false, std::memory_order_relaxed);
  }
  for (Attached& item : taken) add_stream(item.peer, item.stream, std::move(item.connection));
}

void Mesh::Impl::add_stream(int peer_index, int index, Connection connection) {
  if (peer_index < 0 || peer_index >= options.hosts || peer_index == options.host) return;
  if (index < 0 || index > options.streams || !connection.socket.valid()) return;
  Peer& peer = peers[static_cast<size_t>(peer_index)];
  auto& slot = peer.streams[static_cast<size_t>(index)];
  if (slot != nullptr) return;
  if (Status set = set_nonblocking(connection.socket.fd()); !set) return fail(std::move(set));
  slot = std::make_unique<Stream>();
  slot->encrypted = connection.encrypted();
  slot->socket = std::move(connection.socket);
  if (slot->encrypted) {
    slot->writer.protect(std::move(connection.seals.out));
    slot->reader.protect(std::move(connection.seals.in));
  }
  slot->peer = peer_index;
  slot->index = index;
  slot->lane = index == options.streams;
  if (!slot->lane) {
    --missing;
    ++peer.attached;
    const bool asked = options.zero_copy != ZeroCopyMode::kOff;
    if (asked && (slot->encrypted || !slot->zero_copy.enable(slot->socket.fd(), options.zero_copy))) {
      zero_copy_off.fetch_add(1, std::memory_order_relaxed);
    }
  }
  slot->ended = retired && !slot->lane;
  if (slot->ended) return;
  watch(slot.get(), EPOLLIN | EPOLLRDHUP);
  pump(&peer);
}

Status Mesh::Impl::connect_overdue(int64_t now) const {
  if (missing == 0) return Status::ok();
  for (size_t i = 0; i < peers.size(); ++i) {
    const Peer& peer = peers[i];
    if (peer.needed_ns < 0 || peer.attached == options.streams) continue;
    if (now - peer.needed_ns < options.connect_timeout_ns) continue;
    return {Code::kTimeout, "host " + std::to_string(i) + " has connected " + std::to_string(peer.attached) + " of " +
                                std::to_string(options.streams) + " streams in " + duration_text(now - peer.needed_ns) +
                                ": check that its daemon runs and that its data port can be reached from here"};
  }
  return Status::ok();
}

// ---- failing

void Mesh::Impl::fail(Status first) {
  if (status) status = std::move(first);
}

// The peer is gone; what its streams still hold is read first (settle_losses() decides when it is enough).
void Mesh::Impl::lose(Stream* failed, const std::string& how) {
  Peer& peer = peers[static_cast<size_t>(failed->peer)];
  if (failed->ended) unwatch(failed);
  if (failed->parked && failed->registered) {
    // The hang-up would be reported for ever: out of epoll; recv() reads the rest.
    unwatch(failed);
  }
  if (failed->write_broken && !failed->ended && !failed->parked) {
    unwatch(failed);
    make_ready(failed);
  }
  if (peer.lost_ns >= 0 || retired) return;
  peer.lost_ns = now_ns();
  peer.lost = {Code::kUnavailable, "lost host " + std::to_string(failed->peer) + ": " + how};
}

int64_t Mesh::Impl::loss_deadline(const Peer& peer) const {
  if (!peer.let_go) return peer.lost_ns + mesh::kLossGraceNs;
  return std::max(peer.lost_ns, peer.heard_ns) + mesh::kGoodbyeGraceNs;
}

void Mesh::Impl::settle_losses() {
  if (retired && !any_lane()) {
    fail(cause ? Status(Code::kUnavailable, "no connection to any other host is left") : cause);
  }
  for (Peer& peer : peers) {
    if (peer.lost_ns < 0) continue;
    bool held = false;     // something has arrived and waits for its recv()
    bool coming = false;   // something may still arrive
    bool unread = false;   // something is there to be read at once
    bool pending = false;  // the kernel has not given a payload back
    for (const auto& stream : peer.streams) {
      if (stream == nullptr) continue;
      reap(stream.get());  // no event may tell of it any more
      pending = pending || stream->zero_copy.ledger().outstanding();
      if (stream->ended) continue;
      unread = unread || stream->queued;
      held = held || stream->parked;
      coming = coming || !stream->parked;
    }
    const bool ended = !unread && ((!coming && !pending) || now_ns() >= loss_deadline(peer));
    const auto missed = [this, &peer](uint64_t op) { return !peer.let_go || op != options.spare_operation; };
    bool wanted = pending;
    for (const auto& [key, posted] : peer.posted) wanted = wanted || missed(key.op);
    for (const Outgoing& message : peer.data) wanted = wanted || missed(message.op);
    if (peer.let_go) {
      peer.control.clear();  // nobody is there to hear it
    } else {
      wanted = wanted || peer.awaited || !peer.control.empty();
    }
    for (const auto& stream : peer.streams) {
      if (stream == nullptr || (stream->lane && peer.let_go)) continue;
      wanted = wanted || (stream->writer.busy() && missed(stream->writer.current().op));
    }
    peer.settled = ended && (held || peer.let_go) && !wanted;
    if (ended && !peer.settled) fail(peer.lost);
  }
}

// ---- the interface

Mesh::Mesh(MeshOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {}
Mesh::~Mesh() = default;

void Mesh::attach(int peer, int stream, Connection connection) {
  {
    std::lock_guard<std::mutex> lock(impl_->mutex);
    if (impl_->closed) return;
    impl_->attached.push_back({peer, stream, std::move(connection)});
    impl_->any_attached.store(true, std::memory_order_release);
  }
  impl_->event.signal();
}

bool Mesh::connected() const {
  impl_->adopt();
  return impl_->missing == 0;
}

void Mesh::need_all() {
  for (int peer = 0; peer < impl_->options.hosts; ++peer) {
    if (peer != impl_->options.host) impl_->note_need(&impl_->peers[static_cast<size_t>(peer)]);
  }
}

void Mesh::send(int peer, uint64_t op, uint64_t tag, const void* data, size_t bytes, uint64_t cookie) {
  if (!impl_->check_peer(peer, bytes, kMaxMessage, "a message")) return;
  Peer& to = impl_->peers[static_cast<size_t>(peer)];
  to.data.push_back({FrameType::kData, op, tag, data, bytes, cookie, now_ns(), {}});
  to.queued_bytes += bytes;
  impl_->note_need(&to);
  impl_->pump(&to);
}

void Mesh::recv(int peer, uint64_t op, uint64_t tag, void* data, size_t bytes, uint64_t cookie) {
  if (!impl_->check_peer(peer, bytes, kMaxMessage, "a receive")) return;
  Peer& from = impl_->peers[static_cast<size_t>(peer)];
  impl_->note_need(&from);
  if (!from.posted.emplace(mesh::MessageKey{op, tag}, mesh::Posted{data, bytes, cookie, now_ns(), false}).second) {
    impl_->fail({Code::kInternal, "operation " + std::to_string(op) + ", tag " + std::to_string(tag) + " from host " +
                                      std::to_string(peer) + " was posted twice"});
    return;
  }
  for (const auto& stream : from.streams) {
    if (stream == nullptr || !stream->parked || stream->reader.header().op != op ||
        stream->reader.header().tag != tag) {
      continue;
    }
    if (!impl_->claim(stream.get())) return;
    stream->parked = false;
    if (stream->registered) impl_->watch(stream.get(), stream->events | EPOLLIN);
    impl_->make_ready(stream.get());
    return;
  }
}

void Mesh::send_control(int peer, const std::string& text) {
  if (!impl_->check_peer(peer, text.size(), kMaxControl, "a control message")) return;
  Peer& to = impl_->peers[static_cast<size_t>(peer)];
  to.control.push_back({FrameType::kControl, 0, 0, nullptr, 0, 0, now_ns(), text});
  impl_->pump(&to);
}

void Mesh::let_go(int peer) {
  impl_->peers[static_cast<size_t>(peer)].let_go = true;
}

void Mesh::set_waiting(bool waiting) {
  if (waiting == (impl_->waiting_ns >= 0)) return;
  impl_->waiting_ns = waiting ? now_ns() : -1;
  for (Peer& peer : impl_->peers) peer.ping_ns = -1;  // what was asked before counts no more
}

void Mesh::set_awaited(const std::vector<bool>& peers) {
  for (size_t i = 0; i < impl_->peers.size(); ++i) impl_->peers[i].awaited = peers[i];
}

Status Mesh::poll(int64_t deadline_ns, std::vector<Completion>* out) {
  impl_->adopt();
  impl_->end_lanes();
  impl_->settle_losses();  // a new receive from a lost peer may be one that can't come
  for (;;) {
    const bool undisturbed = impl_->wait(deadline_ns);
    impl_->end_lanes();
    impl_->settle_losses();
    if (impl_->status) impl_->watch_peers();
    if (impl_->status) {
      if (Status late = impl_->connect_overdue(now_ns()); !late) impl_->fail(std::move(late));
    }
    if (!impl_->done.empty()) {
      std::move(impl_->done.begin(), impl_->done.end(), std::back_inserter(*out));
      impl_->done.clear();
      return Status::ok();
    }
    if (!impl_->status) return impl_->status;
    if (!undisturbed || (deadline_ns >= 0 && now_ns() >= deadline_ns)) return Status::ok();
  }
}

void Mesh::wake() {
  impl_->woken.store(true, std::memory_order_release);
  impl_->event.signal();
}

Mesh::Counters Mesh::counters() const {
  Counters result;
  result.bytes_sent = impl_->bytes_sent.load(std::memory_order_relaxed);
  result.bytes_received = impl_->bytes_received.load(std::memory_order_relaxed);
  result.bytes_encrypted = impl_->bytes_encrypted.load(std::memory_order_relaxed);
  result.frames_refused = impl_->frames_refused.load(std::memory_order_relaxed);
  result.frames_dropped = impl_->frames_dropped.load(std::memory_order_relaxed);
  result.zero_copy_bytes = impl_->zero_copy_bytes.load(std::memory_order_relaxed);
  result.zero_copy_off = impl_->zero_copy_off.load(std::memory_order_relaxed);
  return result;
}

std::vector<uint64_t> Mesh::stream_bytes(int peer) const {
  std::vector<uint64_t> bytes;
  for (const auto& stream : impl_->peers[static_cast<size_t>(peer)].streams) {
    bytes.push_back(stream == nullptr ? 0 : stream->written);
  }
  bytes.pop_back();  // the control lane
  return bytes;
}

std::string Mesh::describe_waits(int64_t now) const {
  std::string text;
  for (size_t i = 0; i < impl_->peers.size(); ++i) {
    const Peer& peer = impl_->peers[i];
    size_t sends = peer.data.size() + peer.control.size();
    int64_t since = now;
    for (const auto* queue : {&peer.control, &peer.data}) {
      if (!queue->empty()) since = std::min(since, queue->front().since_ns);
    }
    for (const auto& stream : peer.streams) {
      if (stream == nullptr) continue;
      const ZeroCopyLedger& unsent = stream->zero_copy.ledger();
      sends += unsent.held();
      if (unsent.held() > 0) since = std::min(since, unsent.oldest_ns());
      if (!stream->writer.busy()) continue;
      ++sends;
      since = std::min(since, stream->writer.current().since_ns);
    }
    for (const auto& [key, posted] : peer.posted) since = std::min(since, posted.since_ns);
    const bool silent = peer.ping_ns >= 0 && now - peer.ping_ns >= mesh::kPingAfterNs;
    if (sends == 0 && peer.posted.empty() && !silent) continue;
    if (!text.empty()) text += "; ";
    text += "host " + std::to_string(i) + ": " + std::to_string(peer.posted.size()) + " receives and " +
            std::to_string(sends) + " sends outstanding for " + duration_text(now - since);
    if (silent) text += ", has not answered for " + duration_text(now - impl_->quiet_since(peer));
    if (peer.attached < impl_->options.streams) {
      text +=
          ", " + std::to_string(peer.attached) + " of " + std::to_string(impl_->options.streams) + " streams connected";
    }
  }
  return text;
}

}  // namespace bagua
