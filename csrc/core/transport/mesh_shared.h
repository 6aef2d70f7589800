// State shared by all parts of a mesh (mesh_parts.h): options, peers, first error, completions for poll(), counters.
//
// Thread safety: the thread that drives the mesh only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/status.h"
#include "net/socket.h"
#include "transport/mesh.h"
#include "transport/stream.h"
#include "transport/stream_count.h"
#include "transport/stream_rate.h"

namespace bagua::mesh {

// Identifies a message between two hosts.
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
  Fd socket;
  int peer = 0;
  int index = 0;
  bool lane = false;  // carries control messages only
  bool encrypted = false;
  bool ended = false;    // nothing more will be read from it
  bool writable = true;  // until the socket refuses
  bool write_broken = false;
  bool damaged = false;     // it has sent an invalid frame and is not read any more
  bool parked = false;      // its frame waits for a recv()
  bool queued = false;      // in the poller's list of streams to be read
  bool registered = false;  // with epoll
  uint32_t events = 0;      // what epoll watches
  size_t low_water = 1;     // epoll reports the socket when it has this many bytes
  uint64_t written = 0;     // bytes that the socket took
  StreamRate rate;
  StreamReader reader;
  StreamWriter writer;

  // epoll does not watch it, so reads go on until the socket is empty.
  bool eager() const { return !registered; }
  // True if it can take a message now.
  bool is_free() const { return !writer.busy() && writable && !write_broken && !ended; }
};

// One peer of a mesh: its streams, its outgoing queues, and the receives that are posted for it.
struct Peer {
  std::vector<std::unique_ptr<Stream>> streams;  // by index; the last is the control lane; null: not attached
  std::deque<Outgoing> data;
  size_t queued_bytes = 0;  // of `data`
  std::deque<Outgoing> control;
  std::unordered_map<MessageKey, Posted, HashKey> posted;
  StreamCount stream_count;
  int single = -1;          // the one stream that carries all chunks now; -1: several do
  size_t next_stream = 0;   // where the search for a free stream begins
  int attached = 0;         // data streams
  int64_t needed_ns = -1;   // first send or recv while not connected
  int64_t heard_ns = -1;    // the latest bytes from it
  int64_t ping_ns = -1;     // when the unanswered ping was sent
  int64_t lost_ns = -1;     // when the first stream failed
  bool awaited = false;     // the caller waits for a control message from it
  bool settled = false;     // lost, but everything that arrived waits for a recv(): poll() may go on
  bool let_go = false;      // it has said goodbye
  bool pump_again = false;  // Outbox::pump() stopped at its budget
  Status lost;

  Stream* lane() const { return streams.back().get(); }  // nullptr: none is attached
};

struct Shared {
  explicit Shared(MeshOptions given) : options(std::move(given)), peers(static_cast<size_t>(options.hosts)) {
    for (Peer& peer : peers) peer.streams.resize(static_cast<size_t>(options.streams) + 1);
    for (size_t i = 0; i < std::min(options.verdicts.size(), peers.size()); ++i) {
      peers[i].stream_count.share(options.verdicts[i]);
    }
  }

  MeshOptions options;
  std::vector<Peer> peers;
  std::vector<Mesh::Completion> done;
  Status status;         // the first error
  int failed_peer = -1;  // the peer that was lost with it
  bool retired = false;  // only control messages move
  Mesh::Counters totals;

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
