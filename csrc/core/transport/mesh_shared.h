// State shared by all parts of a mesh: options, peers, first error, completions for poll(), counters.
//
// The parts, each of which may call those above it:
//   Poller       finds streams that can be read or written
//   Losses       decides when the end of a peer's connection is an error
//   Outbox       queues messages, and chooses the stream for the next one
//   Connections  takes over attached streams, and finds peers that have not connected in time
//   Intake       matches frames with posted receives
//   Watch        pings peers while the caller waits for them
//   Ending       sends the last messages and closes all connections
// Mesh::Impl holds them and runs the loop of poll().
//
// Thread safety: the thread that drives the mesh only; any thread may read the counters.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "transport/mesh.h"
#include "transport/peer.h"

namespace bagua::mesh {

struct Totals {
  std::atomic<uint64_t> bytes_sent{0}, bytes_received{0}, bytes_encrypted{0};
  std::atomic<uint64_t> frames_dropped{0}, frames_refused{0};
};

inline void add(std::atomic<uint64_t>* total, uint64_t more) {
  total->fetch_add(more, std::memory_order_relaxed);
}

struct Shared {
  explicit Shared(MeshOptions given) : options(std::move(given)), peers(static_cast<size_t>(options.hosts)) {
    for (Peer& peer : peers) peer.streams.resize(static_cast<size_t>(options.streams) + 1);
    for (size_t i = 0; i < std::min(options.verdicts.size(), peers.size()); ++i) {
      peers[i].stream_count.share(options.verdicts[i]);
    }
  }

  const MeshOptions options;
  std::vector<Peer> peers;
  std::vector<Mesh::Completion> done;
  Status status;         // the first error
  int failed_peer = -1;  // the peer that was lost with it
  bool retired = false;  // only control messages move
  Totals totals;

  void fail(Status first, int peer = -1) {
    if (!status) return;
    status = std::move(first);
    failed_peer = peer;
  }
  int index_of(const Peer& peer) const { return static_cast<int>(&peer - peers.data()); }
  std::string name(int peer) const { return options.name ? options.name(peer) : "host " + std::to_string(peer); }
  Peer& peer(int index) { return peers[static_cast<size_t>(index)]; }
  Peer& peer_of(const Stream* stream) { return peer(stream->peer); }
};

}  // namespace bagua::mesh
