// Signs of life of a mesh's peers while its caller waits for them; see mesh.h.
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>

#include "base/text.h"
#include "transport/mesh_impl.h"

namespace bagua {

using mesh::Peer;
using mesh::Stream;

bool Mesh::Impl::watched(const Peer& peer) const {
  return waiting_ns >= 0 && peer.lost_ns < 0 && peer.streams.back() != nullptr;
}

// Since when nothing has come from the peer while we waited; a question that is open has moved it on.
int64_t Mesh::Impl::quiet_since(const Peer& peer) const {
  return std::max(waiting_ns, peer.heard_ns);
}

int64_t Mesh::Impl::ping_after() const {
  return std::min(mesh::kPingAfterNs, options.silence_timeout_ns / 3);
}

void Mesh::Impl::watch_peers() {
  if (waiting_ns < 0) return;
  const int64_t now = now_ns();
  const bool look = now - inspected_ns >= mesh::kInspectNs;
  if (look) inspected_ns = now;
  for (Peer& peer : peers) {
    if (watched(peer)) ask(&peer, now);
    if (look && watched(peer)) inspect(&peer);
  }
}

int64_t Mesh::Impl::patience(const Peer& peer) const {
  return peer.heard_ns < 0 ? options.first_word_timeout_ns : options.silence_timeout_ns;
}

void Mesh::Impl::ask(Peer* peer, int64_t now) {
  const int index = peer->streams.back()->peer;
  if (peer->ping_ns < 0) {
    if (now - quiet_since(*peer) < ping_after()) return;
    for (const auto& stream : peer->streams) {  // what is too little for an event is a sign of life, too
      if (stream == nullptr || stream->low_water == 1) continue;
      stream->reader.readable();
      make_ready(stream.get());
    }
    peer->ping_ns = now;
    peer->control.push_back({FrameType::kPing, 0, 0, nullptr, 0, 0, now, {}});
    return pump(peer);
  }
  if (now - peer->ping_ns < patience(*peer)) return;
  fail({Code::kTimeout, "host " + std::to_string(index) + " has not answered for " +
                            duration_text(now - quiet_since(*peer)) +
                            ": its connections are open, but its daemon does not run. Is it stopped, swapped out or "
                            "starved of processor time?"});
}

void Mesh::Impl::answer(Stream* stream) {
  Peer& peer = peers[static_cast<size_t>(stream->peer)];
  peer.control.push_back({FrameType::kPong, 0, 0, nullptr, 0, 0, now_ns(), {}});
  pump(&peer);
}

// Bytes that are in flight, sent again and never acknowledged: nobody is there. A receiver that is merely full
// acknowledges, however long it takes.
void Mesh::Impl::inspect(Peer* peer) {
  for (const auto& stream : peer->streams) {
    if (stream == nullptr || stream->ended || stream->write_broken) continue;
    tcp_info info{};
    socklen_t length = sizeof info;
    if (::getsockopt(stream->socket.fd(), IPPROTO_TCP, TCP_INFO, &info, &length) != 0) continue;
    const int64_t quiet_ns = int64_t{info.tcpi_last_ack_recv} * kNsPerMs;
    if (info.tcpi_unacked == 0 || info.tcpi_retransmits == 0 || quiet_ns < kDeadConnectionNs) continue;
    stream->ended = true;
    lose(stream.get(), "nothing has been acknowledged for " + duration_text(quiet_ns) +
                           ": the machine or the network between is down");
    return;
  }
}

}  // namespace bagua
