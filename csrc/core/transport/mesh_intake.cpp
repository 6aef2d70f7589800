#include <sys/epoll.h>

#include <string>
#include <utility>

#include "base/clock.h"
#include "base/text.h"
#include "transport/mesh_parts.h"

namespace bagua::mesh {

namespace {

constexpr int64_t kReadBudget = 1 << 20;  // bytes read from a stream before it is another stream's turn

// "host 1, stream 2"
std::string place_of(const Shared& shared, const Stream* stream) {
  return shared.name(stream->peer) + ", stream " + std::to_string(stream->index);
}

}  // namespace

void Intake::post(int index, MessageKey key, Posted receive) {
  Peer& peer = shared_->peer(index);
  if (!peer.posted.emplace(key, receive).second) {
    return shared_->fail({Code::kInternal, "operation " + std::to_string(key.op) + ", tag " + std::to_string(key.tag) +
                                               " from " + shared_->name(index) + " was posted twice"});
  }
  for (const auto& stream : peer.streams) {
    if (stream == nullptr || !stream->parked) continue;
    const FrameHeader& header = stream->reader.header();
    if (header.op != key.op || header.tag != key.tag) continue;
    if (!claim(stream.get())) return;
    stream->parked = false;
    if (stream->registered) poller_->watch(stream.get(), stream->events | EPOLLIN);
    return poller_->make_ready(stream.get());
  }
}

void Intake::read(Stream* stream) {
  using Step = StreamReader::Step;
  int64_t budget = kReadBudget;
  uint64_t received = 0;
  bool more = !stream->ended && !stream->damaged;
  Peer& peer = shared_->peer_of(stream);
  while (more && shared_->status) {
    const Step step = stream->reader.advance(stream->socket.get(), stream->eager(), &budget, &received);
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
        poller_->make_ready(stream);
        break;
      case Step::kBlocked:
        poller_->set_low_water(stream);
        break;
      case Step::kClosed:
        stream->ended = true;
        losses_->lose(stream, stream->reader.mid_frame() ? "it closed the connection in the middle of a message"
                                                         : "it closed the connection");
        break;
      case Step::kBroken:
        stream->ended = true;
        losses_->lose(stream, "the connection broke: " + errno_text(stream->reader.error()));
        break;
      case Step::kCorrupt:
        on_corrupt(stream);
        break;
    }
  }
  if (received > 0) {
    peer.heard_ns = now_ns();
    peer.ping_ns = -1;
  }
  shared_->totals.bytes_received += received;
}

void Intake::on_corrupt(Stream* stream) {
  stream->damaged = true;
  poller_->unwatch(stream);
  ++shared_->totals.frames_refused;
  if (shared_->retired) return;  // messages of other hosts matter more
  shared_->fail({Code::kCorrupt, place_of(*shared_, stream) + ": " + stream->reader.problem()});
}

// Decides about a frame. False: it is parked, or an error was set.
bool Intake::on_header(Stream* stream) {
  const FrameHeader& header = stream->reader.header();
  if (header.generation != shared_->options.generation || header.comm != shared_->options.comm) {
    return drop_foreign(stream);
  }
  switch (header.type) {
    case FrameType::kPing:
      stream->reader.skip();
      outbox_->post(&shared_->peer_of(stream), {FrameType::kPong, 0, 0, nullptr, 0, 0, now_ns(), {}});
      return true;
    case FrameType::kPong:
      stream->reader.skip();
      return true;
    case FrameType::kControl:
      stream->reader.receive_control();
      return true;
    default:
      if (claim(stream)) return true;
      stream->parked = static_cast<bool>(shared_->status);
      return false;
  }
}

// Drops a frame of another generation or communicator.
bool Intake::drop_foreign(Stream* stream) {
  if (stream->encrypted) {  // the keys belong to this communicator, so no host of ours has sent it
    ++shared_->totals.frames_refused;
    shared_->fail({Code::kCorrupt, place_of(*shared_, stream) + ": a frame of another generation or communicator"});
    return false;
  }
  ++shared_->totals.frames_dropped;
  stream->reader.skip();
  return true;
}

// Matches the frame at the head of the stream with its posted receive.
bool Intake::claim(Stream* stream) {
  const FrameHeader& header = stream->reader.header();
  Peer& peer = shared_->peer_of(stream);
  const auto posted = peer.posted.find({header.op, header.tag});
  if (posted == peer.posted.end() || posted->second.claimed) return false;
  if (posted->second.bytes != header.payload_bytes) {
    shared_->fail({Code::kInvalid, shared_->name(stream->peer) + " sent " + std::to_string(header.payload_bytes) +
                                       " bytes where " + std::to_string(posted->second.bytes) +
                                       " were expected (operation " + std::to_string(header.op) + ", tag " +
                                       std::to_string(header.tag) + ")"});
    return false;
  }
  posted->second.claimed = true;
  stream->reader.receive(posted->second.data, posted->second.cookie);
  return true;
}

void Intake::on_payload(Stream* stream) {
  StreamReader& reader = stream->reader;
  if (reader.skipping()) return;
  if (reader.header().type == FrameType::kControl) {
    shared_->done.push_back({Event::kControl, stream->peer, 0, std::move(reader.control())});
    return;
  }
  shared_->peer_of(stream).posted.erase({reader.header().op, reader.header().tag});
  shared_->done.push_back({Event::kReceived, stream->peer, reader.cookie(), {}});
}

}  // namespace bagua::mesh
