#include <linux/sockios.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>

#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "base/text.h"
#include "transport/mesh_parts.h"

namespace bagua::mesh {

namespace {

constexpr size_t kPumpBudget = 2 << 20;  // bytes handed to sockets before it is reading's turn

void measure(Stream* stream, int64_t now) {
  if (!stream->rate.due(now)) return;
  int queued = 0;
  if (::ioctl(stream->socket.get(), SIOCOUTQ, &queued) == 0) {
    stream->rate.sample(now, stream->written, static_cast<uint64_t>(queued));
  }
}

}  // namespace

void Outbox::post(Peer* peer, Outgoing message) {
  if (message.type == FrameType::kData) {
    peer->queued_bytes += message.bytes;
    peer->data.push_back(std::move(message));
  } else {
    peer->control.push_back(std::move(message));
  }
  pump(peer);
}

// The stream for the next chunk; nullptr: wait for an event.
Stream* Outbox::data_stream(Peer* peer, size_t chunk) {
  const auto count = static_cast<size_t>(shared_->options.streams);
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
    loads[n] = {stream->is_free(), stream->rate.rate(now),
                static_cast<double>(stream->rate.backlog(stream->written) + rest)};
    free += loads[n].free ? 1 : 0;
    usable[n++] = stream;
  }
  if (free == 0) return nullptr;
  if (!peer->stream_count.all()) {
    // Keep the stream: TCP would have to find the link's rate anew on another one.
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

void Outbox::pump(Peer* peer) {
  if (!shared_->status) return;  // after an error the payloads belong to the caller again
  size_t handed = 0;
  for (auto* queue : {&peer->control, &peer->data}) {
    while (!queue->empty()) {
      const size_t bytes = queue->front().bytes;
      Stream* stream = queue == &peer->control ? peer->lane() : data_stream(peer, bytes);
      if (stream == nullptr || !stream->is_free()) break;
      if (handed >= kPumpBudget) {
        peer->pump_again = pump_again_ = true;
        break;
      }
      handed += bytes;
      if (queue == &peer->data) peer->queued_bytes -= bytes;
      stream->writer.start(std::move(queue->front()), shared_->options.generation, shared_->options.comm);
      queue->pop_front();
      flush(peer, stream);
    }
  }
  update_stream_count(peer);
}

void Outbox::update_stream_count(Peer* peer) {
  const bool waiting = !peer->data.empty();
  const int64_t now = now_ns();
  if (!peer->stream_count.due(now, waiting)) return;
  uint64_t arrived = 0, on_way = 0;
  for (int i = 0; i < shared_->options.streams; ++i) {
    Stream* stream = peer->streams[static_cast<size_t>(i)].get();
    if (stream == nullptr) continue;
    measure(stream, now);
    arrived += stream->rate.arrived();
    on_way += stream->rate.backlog(stream->written);
  }
  peer->stream_count.update(now, arrived, on_way, waiting);
}

void Outbox::pump_again() {
  if (!std::exchange(pump_again_, false)) return;
  for (Peer& peer : shared_->peers) {
    if (std::exchange(peer.pump_again, false)) pump(&peer);
  }
}

void Outbox::on_writable(Stream* stream) {
  Peer& peer = shared_->peer_of(stream);
  stream->writable = true;
  if (stream->writer.busy()) flush(&peer, stream);
  pump(&peer);
  // Stop watching for room once there is nothing left to write: the next message is written without an event.
  if (stream->registered && stream->writable) poller_->watch(stream, stream->events & ~uint32_t{EPOLLOUT});
}

void Outbox::flush(Peer* peer, Stream* stream) {
  uint64_t sent = 0;
  int problem = 0;
  const StreamWriter::Progress progress = stream->writer.flush(stream->socket.get(), &sent, &problem);
  stream->written += sent;
  shared_->totals.bytes_sent += sent;
  if (stream->encrypted) shared_->totals.bytes_encrypted += sent;
  switch (progress) {
    case StreamWriter::Progress::kDone: {
      const Outgoing& message = stream->writer.current();
      if (message.type == FrameType::kData) {
        shared_->done.push_back({Event::kSent, stream->peer, message.cookie, {}});
      }
      break;
    }
    case StreamWriter::Progress::kBlocked:
      stream->writable = false;
      if (stream->registered) poller_->watch(stream, stream->events | EPOLLOUT);
      break;
    case StreamWriter::Progress::kBroken:
      stream->write_broken = true;
      if (peer->lost_ns < 0) losses_->lose(stream, "the connection broke: " + errno_text(problem));
      break;
  }
}

}  // namespace bagua::mesh
