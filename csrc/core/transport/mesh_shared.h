// State shared by all parts of a mesh (mesh_parts.h): options, peers, first error, completions for poll(), counters.
//
// Thread safety: the thread that drives the mesh only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/status.h"
#include "net/socket.h"
#include "transport/stream.h"
#include "transport/stream_count.h"
#include "transport/stream_rate.h"

namespace bagua {

struct MeshOptions {
  uint64_t generation = 0;
  uint32_t comm = 0;
  int host = 0;  // index of this host among the hosts of the communicator
  int hosts = 1;
  int streams = 4;  // TCP streams for each pair of hosts
  // Counted from the first send to, or receive from, a peer that is not connected.
  int64_t connect_timeout_ns = 30'000'000'000;
  int64_t silence_timeout_ns = 30'000'000'000;  // for the answer to a ping
  // The same for a peer from which nothing has come yet: it may create this communicator much later.
  int64_t first_word_timeout_ns = INT64_MAX / 4;
  // By peer: whether to use one stream or all, see transport/stream_count.h; must outlive the mesh. Empty: not known.
  std::vector<StreamVerdict*> verdicts = {};
  // Messages of this operation are not wanted any more from a peer that has been let go.
  uint64_t spare_operation = UINT64_MAX;
  // Name of host `peer` in errors and descriptions; empty: "host 1".
  std::function<std::string(int peer)> name = {};
};

namespace mesh {

enum class Event : uint8_t {
  kSent,      // the kernel has a copy of the payload: its memory may be reused
  kReceived,  // the payload of a receive is complete and its checksum is right
  kControl,   // a control message arrived: see `control`
};
struct Completion {
  Event event;
  int peer;
  uint64_t cookie;      // the argument of send() or recv()
  std::string control;  // kControl only
};
struct Counters {
  uint64_t bytes_sent = 0, bytes_received = 0;  // payload and headers
  uint64_t bytes_encrypted = 0;                 // of bytes_sent
  uint64_t frames_dropped = 0;                  // of another generation or communicator
  uint64_t frames_refused = 0;                  // damaged or not authentic; the first ends the mesh
};

constexpr int kMaxStreams = 64;
constexpr size_t kMaxMessage = 16u << 20;
constexpr size_t kMaxControl = 64u << 10;  // the caller must not send longer texts or longer chunks
constexpr int64_t kDeadConnectionNs = 20'000'000'000;

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
  std::vector<Completion> done;
  Status status;         // the first error
  int failed_peer = -1;  // the peer that was lost with it
  bool retired = false;  // only control messages move
  Counters totals;

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

}  // namespace mesh
}  // namespace bagua
