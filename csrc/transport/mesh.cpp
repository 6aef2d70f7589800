#include "transport/mesh.h"

#include <sys/epoll.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <deque>
#include <iterator>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "base/clock.h"
#include "base/fd.h"
#include "base/text.h"
#include "transport/stream.h"

namespace bagua {
namespace {

constexpr int64_t kReadBudget = 1 << 20;  // bytes from one stream before the others get their turn
constexpr size_t kPumpBudget = 2 << 20;   // bytes handed to sockets before reading gets its turn
// After the first stream of a peer has closed, its other streams may still bring what was on its way.
constexpr int64_t kLossGraceNs = 200 * kNsPerMs;

struct MessageKey {
  uint64_t op;
  uint64_t tag;
  bool operator==(const MessageKey& other) const { return op == other.op && tag == other.tag; }
};

struct HashKey {
  size_t operator()(const MessageKey& key) const {
    uint64_t x = key.op * 0x9e3779b97f4a7c15u + key.tag;
    x ^= x >> 32;
    return static_cast<size_t>(x * 0xd6e8feb86659fd93u);
  }
};

struct Posted {
  void* data;
  size_t bytes;
  uint64_t cookie;
  int64_t since_ns;
  bool claimed = false;  // a frame is being received into it
};

struct Stream {
  Socket socket;
  int peer = 0;
  int index = 0;
  bool lane = false;     // carries control messages only
  bool ended = false;    // nothing will come from it any more
  bool writable = true;  // until the socket refuses
  bool write_broken = false;
  bool parked = false;      // its frame waits for a recv()
  bool queued = false;      // in Impl::ready
  bool registered = false;  // with epoll
  uint32_t events = 0;      // what epoll watches
  StreamReader reader;
  StreamWriter writer;

  // No event tells of what comes: read until the socket is empty.
  bool eager() const { return !registered; }
};

struct Peer {
  std::vector<std::unique_ptr<Stream>> streams;  // by index; the last is the control lane; null: not attached
  std::deque<Outgoing> data;
  std::deque<Outgoing> control;
  std::unordered_map<MessageKey, Posted, HashKey> posted;
  size_t next_stream = 0;   // where the search for a free stream begins
  int attached = 0;         // data streams
  int64_t needed_ns = -1;   // first send or recv while not connected
  int64_t lost_ns = -1;     // when the first stream failed
  bool settled = false;     // lost, but everything that arrived waits for a recv(): poll() may go on
  bool pump_again = false;  // pump() stopped at its budget
  Status lost;
};

}  // namespace

struct Mesh::Impl {
  explicit Impl(MeshOptions given);

  MeshOptions options;  // constant after construction
  Fd epoll;
  EventFd event;

  // From any thread:
  std::mutex mutex;
  struct Attached {
    int peer;
    int stream;
    Socket socket;
  };
  std::vector<Attached> attached;  // protected by mutex
  std::atomic<bool> any_attached{false};
  std::atomic<bool> woken{false};
  std::atomic<uint64_t> bytes_sent{0}, bytes_received{0}, frames_dropped{0};

  // Of the driving thread:
  std::vector<Peer> peers;
  std::vector<Stream*> ready;  // to be read without an event
  std::vector<Completion> done;
  int missing = 0;  // data streams not attached yet
  bool any_pump_again = false;
  Status status;  // the first error

  // Attaching
  void adopt();
  void add_stream(int peer, int stream, Socket socket);
  Status connect_overdue(int64_t now) const;
  // Sending
  bool check_peer(int peer, size_t bytes, size_t limit, const char* what);
  void note_need(Peer* peer);
  void pump(Peer* peer);
  void flush(Peer* peer, Stream* stream);
  Stream* free_stream(Peer* peer, bool control);
  // Receiving
  void make_ready(Stream* stream);
  void read(Stream* stream, int64_t budget);
  bool on_header(Stream* stream);
  bool claim(Stream* stream);
  void on_payload(Stream* stream);
  // Events
  void watch(Stream* stream, uint32_t events);
  void unwatch(Stream* stream);
  void on_event(Stream* stream, uint32_t events);
  bool wait(int64_t deadline_ns);
  int64_t next_deadline(int64_t deadline_ns) const;
  // Failing
  void fail(Status first);
  void lose(Stream* stream, const std::string& how);
  void settle_losses();
};

Mesh::Impl::Impl(MeshOptions given) : options(std::move(given)), peers(static_cast<size_t>(options.hosts)) {
  for (Peer& peer : peers) peer.streams.resize(static_cast<size_t>(options.streams) + 1);
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
  for (Attached& item : taken) add_stream(item.peer, item.stream, std::move(item.socket));
}

void Mesh::Impl::add_stream(int peer_index, int index, Socket socket) {
  if (peer_index < 0 || peer_index >= options.hosts || peer_index == options.host) return;
  if (index < 0 || index > options.streams || !socket.valid()) return;
  Peer& peer = peers[static_cast<size_t>(peer_index)];
  auto& slot = peer.streams[static_cast<size_t>(index)];
  if (slot != nullptr) return;
  if (Status set = set_nonblocking(socket.fd()); !set) return fail(std::move(set));
  slot = std::make_unique<Stream>();
  slot->socket = std::move(socket);
  slot->peer = peer_index;
  slot->index = index;
  slot->lane = index == options.streams;
  if (!slot->lane) {
    --missing;
    ++peer.attached;
  }
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

Stream* Mesh::Impl::free_stream(Peer* peer, bool control) {
  const auto free = [](const Stream* s) {
    return s != nullptr && !s->writer.busy() && s->writable && !s->write_broken && !s->ended;
  };
  Stream* lane = peer->streams.back().get();
  if (control && lane != nullptr) return free(lane) ? lane : nullptr;
  const auto count = static_cast<size_t>(options.streams);
  for (size_t i = 0; i < count; ++i) {
    const size_t index = (peer->next_stream + i) % count;
    if (!free(peer->streams[index].get())) continue;
    peer->next_stream = (index + 1) % count;
    return peer->streams[index].get();
  }
  return nullptr;
}

// Hands queued messages to streams until none is free.
void Mesh::Impl::pump(Peer* peer) {
  if (!status) return;  // the payloads are the caller's again
  size_t handed = 0;
  for (auto* queue : {&peer->control, &peer->data}) {
    while (!queue->empty()) {
      Stream* stream = free_stream(peer, queue == &peer->control);
      if (stream == nullptr) break;
      if (handed >= kPumpBudget) {
        peer->pump_again = any_pump_again = true;
        break;
      }
      handed += queue->front().bytes;
      stream->writer.start(std::move(queue->front()), options.generation, options.comm);
      queue->pop_front();
      flush(peer, stream);
    }
  }
}

void Mesh::Impl::flush(Peer* peer, Stream* stream) {
  uint64_t sent = 0;
  int problem = 0;
  const StreamWriter::Progress progress = stream->writer.flush(stream->socket.fd(), &sent, &problem);
  bytes_sent.fetch_add(sent, std::memory_order_relaxed);
  switch (progress) {
    case StreamWriter::Progress::kDone: {
      const Outgoing& message = stream->writer.current();
      if (message.type == FrameType::kData) done.push_back({Event::kSent, stream->peer, message.cookie, {}});
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

// ---- receiving

void Mesh::Impl::make_ready(Stream* stream) {
  if (stream->queued || stream->ended) return;
  stream->queued = true;
  ready.push_back(stream);
}

void Mesh::Impl::read(Stream* stream, int64_t budget) {
  using Step = StreamReader::Step;
  uint64_t received = 0;
  bool more = !stream->ended;
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
        fail({Code::kCorrupt, "host " + std::to_string(stream->peer) + ", stream " + std::to_string(stream->index) +
                                  ": " + stream->reader.problem()});
        break;
    }
  }
  bytes_received.fetch_add(received, std::memory_order_relaxed);
}

// Decides about a frame; false: it is parked (or an error).
bool Mesh::Impl::on_header(Stream* stream) {
  const FrameHeader& header = stream->reader.header();
  if (header.generation != options.generation || header.comm != options.comm) {
    frames_dropped.fetch_add(1, std::memory_order_relaxed);
    stream->reader.skip();
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

void Mesh::Impl::on_event(Stream* stream, uint32_t events) {
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
  if (!stream->parked) return read(stream, kReadBudget);
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
    if (peer.lost_ns >= 0 && !peer.settled) earlier(peer.lost_ns + kLossGraceNs);
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
    if (!stream->parked) read(stream, kReadBudget);
  }
  return !woken.exchange(false, std::memory_order_acq_rel);
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
  if (peer.lost_ns >= 0) return;
  peer.lost_ns = now_ns();
  peer.lost = {Code::kUnavailable, "lost host " + std::to_string(failed->peer) + ": " + how};
}

void Mesh::Impl::settle_losses() {
  for (Peer& peer : peers) {
    if (peer.lost_ns < 0) continue;
    bool held = false;    // something has arrived and waits for its recv()
    bool coming = false;  // something may still arrive
    bool unread = false;  // something is there to be read at once
    for (const auto& stream : peer.streams) {
      if (stream == nullptr || stream->ended) continue;
      unread = unread || stream->queued;
      held = held || stream->parked;
      coming = coming || !stream->parked;
    }
    const bool ended = !unread && (!coming || now_ns() >= peer.lost_ns + kLossGraceNs);
    bool wanted = !peer.posted.empty() || !peer.data.empty() || !peer.control.empty();
    for (const auto& stream : peer.streams) wanted = wanted || (stream != nullptr && stream->writer.busy());
    peer.settled = ended && held && !wanted;
    if (ended && !peer.settled) fail(peer.lost);
  }
}

// ---- the interface

Mesh::Mesh(MeshOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {}
Mesh::~Mesh() = default;

void Mesh::attach(int peer, int stream, Socket socket) {
  {
    std::lock_guard<std::mutex> lock(impl_->mutex);
    impl_->attached.push_back({peer, stream, std::move(socket)});
    impl_->any_attached.store(true, std::memory_order_release);
  }
  impl_->event.signal();
}

bool Mesh::connected() const {
  impl_->adopt();
  return impl_->missing == 0;
}

void Mesh::send(int peer, uint64_t op, uint64_t tag, const void* data, size_t bytes, uint64_t cookie) {
  if (!impl_->check_peer(peer, bytes, kMaxMessage, "a message")) return;
  Peer& to = impl_->peers[static_cast<size_t>(peer)];
  to.data.push_back({FrameType::kData, op, tag, data, bytes, cookie, now_ns(), {}});
  impl_->note_need(&to);
  impl_->pump(&to);
}

void Mesh::recv(int peer, uint64_t op, uint64_t tag, void* data, size_t bytes, uint64_t cookie) {
  if (!impl_->check_peer(peer, bytes, kMaxMessage, "a receive")) return;
  Peer& from = impl_->peers[static_cast<size_t>(peer)];
  impl_->note_need(&from);
  if (!from.posted.emplace(MessageKey{op, tag}, Posted{data, bytes, cookie, now_ns(), false}).second) {
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

Status Mesh::poll(int64_t deadline_ns, std::vector<Completion>* out) {
  impl_->adopt();
  impl_->settle_losses();  // a new receive from a lost peer may be one that can't come
  for (;;) {
    const bool undisturbed = impl_->wait(deadline_ns);
    impl_->settle_losses();
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
  result.frames_dropped = impl_->frames_dropped.load(std::memory_order_relaxed);
  return result;
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
      if (stream == nullptr || !stream->writer.busy()) continue;
      ++sends;
      since = std::min(since, stream->writer.current().since_ns);
    }
    for (const auto& [key, posted] : peer.posted) since = std::min(since, posted.since_ns);
    if (sends == 0 && peer.posted.empty()) continue;
    if (!text.empty()) text += "; ";
    text += "host " + std::to_string(i) + ": " + std::to_string(peer.posted.size()) + " receives and " +
            std::to_string(sends) + " sends outstanding for " + duration_text(now - since);
    if (peer.attached < impl_->options.streams) {
      text +=
          ", " + std::to_string(peer.attached) + " of " + std::to_string(impl_->options.streams) + " streams connected";
    }
  }
  return text;
}

}  // namespace bagua
