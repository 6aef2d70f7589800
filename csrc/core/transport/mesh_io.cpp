// Sending, receiving and events of a mesh; see mesh.cpp for the interface and what happens when something fails.
#include <linux/sockios.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <utility>
#include <vector>

#include "base/text.h"
#include "transport/mesh_impl.h"

namespace bagua {

using mesh::Peer;
using mesh::Stream;

// ---- sending

bool Mesh::Impl::check_peer(int peer, size_t bytes, size_t limit, const char* what) {
  if (!status) return false;
  if (peer < 0 || peer >= options.hosts || peer == options.host) {
    fail({Code::kInvalid, std::string(what) + " names host " + std::to_string(peer) + ", which is no other host of " +
                              std::to_string(options.hosts)});
    return false;
  }
  if (bytes > limit) {
    fail({Code::kInvalid, std::string(what) + " of " + std::to_string(bytes) + " bytes with host " +
                              std::to_string(peer) + ": at most " + std::to_string(limit) + " are allowed"});
    return false;
  }
  return true;
}

void Mesh::Impl::note_need(Peer* peer) {
  if (missing > 0 && peer->needed_ns < 0 && peer->attached < options.streams) peer->needed_ns = now_ns();
}

namespace {

bool is_free(const Stream* s) {
  return s != nullptr && !s->writer.busy() && s->writable && !s->write_broken && !s->ended;
}

void measure(Stream* stream, int64_t now) {
  if (!stream->rate.due(now)) return;
  int queued = 0;
  if (::ioctl(stream->socket.fd(), SIOCOUTQ, &queued) == 0) {
    stream->rate.sample(now, stream->written, static_cast<uint64_t>(queued));
  }
}

}  // namespace

Stream* Mesh::Impl::control_stream(Peer* peer) {
  Stream* lane = peer->streams.back().get();
  if (lane != nullptr) return is_free(lane) ? lane : nullptr;
  for (const auto& stream : peer->streams) {
    if (is_free(stream.get())) return stream.get();
  }
  return nullptr;
}

// The stream for the next chunk, nullptr: wait for an event.
Stream* Mesh::Impl::data_stream(Peer* peer, size_t chunk) {
  const auto count = static_cast<size_t>(options.streams);
  Stream* usable[kMaxStreams];
  StreamLoad loads[kMaxStreams];
  int n = 0, begin = 0, free = 0;
  const int64_t now = now_ns();
  for (size_t i = 0; i < count; ++i) {
    Stream* stream = peer->streams[i].get();
    if (stream == nullptr || stream->write_broken || stream->ended) continue;
    if (i < peer->next_stream) begin = n + 1;
    measure(stream, now);
    const size_t rest = stream->writer.rest();
    loads[n] = {is_free(stream), stream->rate.rate(now),
                static_cast<double>(stream->rate.backlog(stream->written) + rest)};
    free += loads[n].free ? 1 : 0;
    usable[n++] = stream;
  }
  if (free == 0) return nullptr;
  if (!peer->stream_count.all()) {
    // Stays with its stream: another one would have to find the link's rate anew.
    const auto same = [peer](const Stream* s) { return s->index == peer->single; };
    const auto found = std::find_if(usable, usable + n, same);
    const auto faster = [](const StreamLoad& x, const StreamLoad& y) { return x.rate < y.rate; };
    const auto best = found != usable + n ? found - usable : std::max_element(loads, loads + n, faster) - loads;
    peer->single = usable[best]->index;
    return loads[best].free ? usable[best] : nullptr;
  }
  peer->single = -1;
  const int chosen =
      choose_stream(loads, n, begin, static_cast<double>(chunk), static_cast<double>(peer->queued_bytes));
  if (chosen < 0) return nullptr;
  peer->next_stream = (static_cast<size_t>(usable[chosen]->index) + 1) % count;
  return usable[chosen];
}

// Hands queued messages to streams until none is free.
void Mesh::Impl::pump(Peer* peer) {
  if (!status) return;  // the payloads are the caller's again
  size_t handed = 0;
  for (auto* queue : {&peer->control, &peer->data}) {
    while (!queue->empty()) {
      const size_t bytes = queue->front().bytes;
      Stream* stream = queue == &peer->control ? control_stream(peer) : data_stream(peer, bytes);
      if (stream == nullptr) break;
      if (handed >= mesh::kPumpBudget) {
        peer->pump_again = any_pump_again = true;
        break;
      }
      handed += bytes;
      if (queue == &peer->data) peer->queued_bytes -= bytes;
      stream->writer.start(std::move(queue->front()), options.generation, options.comm);
      queue->pop_front();
      flush(peer, stream);
    }
  }
  if (!peer->stream_count.due(now_ns(), !peer->data.empty())) return;
  const int64_t now = now_ns();
  uint64_t arrived = 0, on_way = 0;
  for (int i = 0; i < options.streams; ++i) {
    Stream* stream = peer->streams[static_cast<size_t>(i)].get();
    if (stream == nullptr) continue;
    measure(stream, now);
    arrived += stream->rate.arrived();
    on_way += stream->rate.backlog(stream->written);
  }
  peer->stream_count.update(now, arrived, on_way, !peer->data.empty());
}

void Mesh::Impl::flush(Peer* peer, Stream* stream) {
  uint64_t sent = 0;
  int problem = 0;
  ZeroCopy& zero_copy = stream->zero_copy;
  const bool was_on = zero_copy.on();
  const uint64_t bytes_before = zero_copy.bytes();
  const StreamWriter::Progress progress = stream->writer.flush(stream->socket.fd(), &zero_copy, &sent, &problem);
  zero_copy_bytes.fetch_add(zero_copy.bytes() - bytes_before, std::memory_order_relaxed);
  if (was_on && !zero_copy.on()) zero_copy_off.fetch_add(1, std::memory_order_relaxed);
  stream->written += sent;
  bytes_sent.fetch_add(sent, std::memory_order_relaxed);
  if (stream->encrypted) bytes_encrypted.fetch_add(sent, std::memory_order_relaxed);
  switch (progress) {
    case StreamWriter::Progress::kDone: {
      const Outgoing& message = stream->writer.current();
      if (message.type == FrameType::kData && !zero_copy.hold(message.cookie, message.since_ns)) {
        done.push_back({Event::kSent, stream->peer, message.cookie, {}});
      }
      break;
    }
    case StreamWriter::Progress::kBlocked:
      stream->writable = false;
      if (stream->registered) watch(stream, stream->events | EPOLLOUT);
      break;
    case StreamWriter::Progress::kBroken:
      stream->write_broken = true;
      if (peer->lost_ns < 0) lose(stream, "the connection broke: " + errno_text(problem));
      break;
  }
}

// Takes the kernel's word for payloads that it has sent without a copy. False: it had none.
bool Mesh::Impl::reap(Stream* stream) {
  ZeroCopy& zero_copy = stream->zero_copy;
  if (retired || !zero_copy.enabled()) return false;
  const bool was_on = zero_copy.on();
  std::vector<uint64_t> cookies;
  const bool any = zero_copy.reap(stream->socket.fd(), &cookies);
  if (was_on && !zero_copy.on()) zero_copy_off.fetch_add(1, std::memory_order_relaxed);
  for (const uint64_t cookie : cookies) done.push_back({Event::kSent, stream->peer, cookie, {}});
  return any;
}

// ---- receiving

void Mesh::Impl::make_ready(Stream* stream) {
  if (stream->queued || stream->ended) return;
  stream->queued = true;
  ready.push_back(stream);
}

// Lets epoll tell of the stream when the missing part of a frame is there, or a good piece of it. Less than asked for
// is always right, and more would wait for bytes that may never come.
void Mesh::Impl::set_low_water(Stream* stream) {
  const size_t wanted = std::min(stream->reader.missing(), mesh::kMostLowWater);
  if (wanted >= stream->low_water && wanted < 2 * stream->low_water) return;
  const int bytes = static_cast<int>(wanted);
  if (::setsockopt(stream->socket.fd(), SOL_SOCKET, SO_RCVLOWAT, &bytes, sizeof bytes) == 0) stream->low_water = wanted;
}

void Mesh::Impl::read(Stream* stream, int64_t budget) {
  using Step = StreamReader::Step;
  uint64_t received = 0;
  bool more = !stream->ended && !stream->damaged;
  Peer& peer = peers[static_cast<size_t>(stream->peer)];
  while (more && status) {
    const Step step = stream->reader.advance(stream->socket.fd(), stream->eager(), &budget, &received);
    more = false;
    switch (step) {
      case Step::kHeader:
        more = on_header(stream);
        break;
      case Step::kPayload:
        on_payload(stream);
        more = true;
        break;
      case Step::kYield:
        make_ready(stream);
        break;
      case Step::kBlocked:
        set_low_water(stream);
        break;
      case Step::kClosed:
        stream->ended = true;
        lose(stream, stream->reader.mid_frame() ? "it closed the connection in the middle of a message"
                                                : "it closed the connection");
        break;
      case Step::kBroken:
        stream->ended = true;
        lose(stream, "the connection broke: " + errno_text(stream->reader.error()));
        break;
      case Step::kCorrupt:
        stream->damaged = true;
        unwatch(stream);
        frames_refused.fetch_add(1, std::memory_order_relaxed);
        if (retired) break;  // what others still have to say matters more
        fail({Code::kCorrupt, "host " + std::to_string(stream->peer) + ", stream " + std::to_string(stream->index) +
                                  ": " + stream->reader.problem()});
        break;
    }
  }
  if (received > 0) {
    peer.heard_ns = now_ns();
    peer.ping_ns = -1;
  }
  bytes_received.fetch_add(received, std::memory_order_relaxed);
}

// Decides about a frame; false: it is parked (or an error).
bool Mesh::Impl::on_header(Stream* stream) {
  const FrameHeader& header = stream->reader.header();
  if (header.generation != options.generation || header.comm != options.comm) {
    if (stream->encrypted) {  // its keys belong to this communicator: no host sends that
      frames_refused.fetch_add(1, std::memory_order_relaxed);
      fail({Code::kCorrupt, "host " + std::to_string(stream->peer) + ", stream " + std::to_string(stream->index) +
                                ": a frame of another generation or communicator"});
      return false;
    }
    frames_dropped.fetch_add(1, std::memory_order_relaxed);
    stream->reader.skip();
    return true;
  }
  if (header.type == FrameType::kPing || header.type == FrameType::kPong) {
    stream->reader.skip();
    if (header.type == FrameType::kPing) answer(stream);
    return true;
  }
  if (header.type == FrameType::kControl) {
    stream->reader.receive_control();
    return true;
  }
  if (claim(stream)) return true;
  stream->parked = static_cast<bool>(status);
  return false;
}

// Joins the frame at the head of the stream with its posted receive.
bool Mesh::Impl::claim(Stream* stream) {
  const FrameHeader& header = stream->reader.header();
  Peer& peer = peers[static_cast<size_t>(stream->peer)];
  const auto posted = peer.posted.find({header.op, header.tag});
  if (posted == peer.posted.end() || posted->second.claimed) return false;
  if (posted->second.bytes != header.payload_bytes) {
    fail({Code::kInvalid, "host " + std::to_string(stream->peer) + " sent " + std::to_string(header.payload_bytes) +
                              " bytes where " + std::to_string(posted->second.bytes) + " were expected (operation " +
                              std::to_string(header.op) + ", tag " + std::to_string(header.tag) + ")"});
    return false;
  }
  posted->second.claimed = true;
  stream->reader.receive(posted->second.data, posted->second.cookie);
  return true;
}

void Mesh::Impl::on_payload(Stream* stream) {
  StreamReader& reader = stream->reader;
  if (reader.skipping()) return;
  if (reader.header().type == FrameType::kControl) {
    done.push_back({Event::kControl, stream->peer, 0, std::move(reader.control())});
    return;
  }
  Peer& peer = peers[static_cast<size_t>(stream->peer)];
  peer.posted.erase({reader.header().op, reader.header().tag});
  done.push_back({Event::kReceived, stream->peer, reader.cookie(), {}});
}

// ---- events

void Mesh::Impl::watch(Stream* stream, uint32_t events) {
  if (stream->registered && stream->events == events) return;
  epoll_event watched{};
  watched.events = events;
  watched.data.ptr = stream;
  const int operation = stream->registered ? EPOLL_CTL_MOD : EPOLL_CTL_ADD;
  if (::epoll_ctl(epoll.get(), operation, stream->socket.fd(), &watched) != 0) {
    return fail({Code::kResource, "can't watch a connection: " + errno_text(errno)});
  }
  stream->registered = true;
  stream->events = events;
}

void Mesh::Impl::unwatch(Stream* stream) {
  if (!stream->registered) return;
  ::epoll_ctl(epoll.get(), EPOLL_CTL_DEL, stream->socket.fd(), nullptr);
  stream->registered = false;
}

// Whether EPOLLERR may tell of a connection that broke. The error queue raises it, too, and until it is empty; a broken
// connection is also hung up.
bool Mesh::Impl::is_error(Stream* stream, uint32_t events) {
  if ((events & EPOLLERR) == 0) return false;
  if (!stream->zero_copy.enabled()) return true;
  if (reap(stream) || (events & (EPOLLRDHUP | EPOLLHUP)) != 0) return false;
  if (!stream->parked) return true;  // read() will see
  int error = 0;
  socklen_t length = sizeof error;
  return ::getsockopt(stream->socket.fd(), SOL_SOCKET, SO_ERROR, &error, &length) != 0 || error != 0;
}

void Mesh::Impl::on_event(Stream* stream, uint32_t events) {
  if (!is_error(stream, events)) events &= ~uint32_t{EPOLLERR};
  Peer& peer = peers[static_cast<size_t>(stream->peer)];
  if ((events & EPOLLOUT) != 0) {
    stream->writable = true;
    if (stream->writer.busy()) flush(&peer, stream);
    pump(&peer);
    // Watched until it reports with nothing left to write: then the next message is written without an event.
    if (stream->registered && stream->writable) watch(stream, stream->events & ~uint32_t{EPOLLOUT});
  }
  if ((events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) == 0 || !stream->registered) return;
  stream->reader.readable();
  if (!stream->parked) return read(stream, mesh::kReadBudget);
  if ((events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) {
    lose(stream, "it closed the connection");
  } else {
    watch(stream, stream->events & ~uint32_t{EPOLLIN});  // again at recv()
  }
}

int64_t Mesh::Impl::next_deadline(int64_t deadline_ns) const {
  const auto earlier = [&deadline_ns](int64_t at) {
    if (deadline_ns < 0 || at < deadline_ns) deadline_ns = at;
  };
  for (const Peer& peer : peers) {
    if (peer.lost_ns >= 0 && !peer.settled) earlier(loss_deadline(peer));
    if (watched(peer)) {
      earlier(peer.ping_ns < 0 ? quiet_since(peer) + ping_after() : peer.ping_ns + patience(peer));
      earlier(inspected_ns + mesh::kInspectNs);
    }
    if (missing > 0 && peer.needed_ns >= 0 && peer.attached < options.streams) {
      earlier(peer.needed_ns + options.connect_timeout_ns);
    }
  }
  return deadline_ns;
}

// Waits for events and handles them. False: wake() was called.
bool Mesh::Impl::wait(int64_t deadline_ns) {
  epoll_event events[64];
  const bool busy = !done.empty() || !ready.empty() || any_pump_again || !status;
  const int count = ::epoll_wait(epoll.get(), events, 64, busy ? 0 : timeout_ms(next_deadline(deadline_ns)));
  if (count < 0 && errno != EINTR) fail({Code::kInternal, "epoll_wait: " + errno_text(errno)});
  for (int i = 0; i < count && status; ++i) {
    if (events[i].data.ptr != nullptr) {
      on_event(static_cast<Stream*>(events[i].data.ptr), events[i].events);
    } else {
      event.drain();
    }
  }
  adopt();
  if (std::exchange(any_pump_again, false)) {
    for (Peer& peer : peers) {
      if (std::exchange(peer.pump_again, false)) pump(&peer);
    }
  }
  std::vector<Stream*> now_ready;
  now_ready.swap(ready);
  for (Stream* stream : now_ready) {
    stream->queued = false;
    if (!stream->parked) read(stream, mesh::kReadBudget);
  }
  return !woken.exchange(false, std::memory_order_acq_rel);
}

}  // namespace bagua
