// The inside of a Mesh. Everything but `attached`, the flags and the counters belongs to the driving thread.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/fd.h"
#include "transport/mesh.h"
#include "transport/stream.h"
#include "transport/stream_count.h"
#include "transport/stream_rate.h"

namespace bagua::mesh {

constexpr int64_t kReadBudget = 1 << 20;  // bytes from one stream before the others get their turn
constexpr size_t kPumpBudget = 2 << 20;   // bytes handed to sockets before reading gets its turn
// An event for every packet would interrupt the ranks' computation thousands of times a second; one for this many bytes
// does not, and is in time for TCP to go on.
constexpr size_t kMostLowWater = 64 << 10;
// After the first stream of a peer has closed, its other streams may still bring what was on its way.
constexpr int64_t kLossGraceNs = 200 * kNsPerMs;
// The same for a peer that has said goodbye, from the latest byte on: all that it sent is in sockets and will come.
constexpr int64_t kGoodbyeGraceNs = 20 * kNsPerS;

// While the caller waits: silence of a peer before it is asked for a sign of life (at most), and how often its
// connections are looked at.
constexpr int64_t kPingAfterNs = kNsPerS;
constexpr int64_t kInspectNs = kNsPerS;

// Names of a message between two hosts.
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
  bool lane = false;  // carries control messages only
  bool encrypted = false;
  bool ended = false;    // nothing will come from it any more
  bool writable = true;  // until the socket refuses
  bool write_broken = false;
  bool damaged = false;     // what came from it was no frame: it is read no more
  bool parked = false;      // its frame waits for a recv()
  bool queued = false;      // in Impl::ready
  bool registered = false;  // with epoll
  uint32_t events = 0;      // what epoll watches
  size_t low_water = 1;     // bytes in the socket from which on epoll tells of them
  uint64_t written = 0;     // bytes that the socket took
  StreamRate rate;
  StreamReader reader;
  StreamWriter writer;
  ZeroCopy zero_copy;

  // No event tells of what comes: read until the socket is empty.
  bool eager() const { return !registered; }
};

struct Peer {
  std::vector<std::unique_ptr<Stream>> streams;  // by index; the last is the control lane; null: not attached
  std::deque<Outgoing> data;
  size_t queued_bytes = 0;  // of `data`
  std::deque<Outgoing> control;
  std::unordered_map<MessageKey, Posted, HashKey> posted;
  StreamCount stream_count;
  int single = -1;          // the stream that carries all chunks now; -1: none alone
  size_t next_stream = 0;   // where the search for a free stream begins
  int attached = 0;         // data streams
  int64_t needed_ns = -1;   // first send or recv while not connected
  int64_t heard_ns = -1;    // the latest bytes from it
  int64_t ping_ns = -1;     // when it was asked for a sign of life that has not come
  int64_t lost_ns = -1;     // when the first stream failed
  bool awaited = false;     // the caller waits for a control message from it
  bool settled = false;     // lost, but everything that arrived waits for a recv(): poll() may go on
  bool let_go = false;      // it has said goodbye
  bool pump_again = false;  // pump() stopped at its budget
  Status lost;
};

}  // namespace bagua::mesh

namespace bagua {

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
    Connection connection;
  };
  std::vector<Attached> attached;  // protected by mutex
  bool closed = false;             // protected by mutex: takes no connections any more
  std::atomic<bool> any_attached{false};
  std::atomic<bool> woken{false};
  std::atomic<uint64_t> bytes_sent{0}, bytes_received{0}, bytes_encrypted{0};
  std::atomic<uint64_t> frames_dropped{0}, frames_refused{0};
  std::atomic<uint64_t> zero_copy_bytes{0}, zero_copy_off{0};

  // Of the driving thread:
  std::vector<mesh::Peer> peers;
  std::vector<mesh::Stream*> ready;  // to be read without an event
  std::vector<Completion> done;
  int missing = 0;  // data streams not attached yet
  bool any_pump_again = false;
  int64_t waiting_ns = -1;   // since when the caller waits for others
  int64_t inspected_ns = 0;  // when the connections were looked at
  Status status;             // the first error
  bool retired = false;      // only control messages move
  bool hanging_up = false;   // lanes end when nothing is left to be written
  Status cause;              // `status` when it was retired

  // Attaching
  void adopt();
  void add_stream(int peer, int stream, Connection connection);
  Status connect_overdue(int64_t now) const;
  // Sending
  bool check_peer(int peer, size_t bytes, size_t limit, const char* what);
  void note_need(mesh::Peer* peer);
  void pump(mesh::Peer* peer);
  void flush(mesh::Peer* peer, mesh::Stream* stream);
  mesh::Stream* control_stream(mesh::Peer* peer);
  mesh::Stream* data_stream(mesh::Peer* peer, size_t chunk);
  bool reap(mesh::Stream* stream);
  // Receiving
  void make_ready(mesh::Stream* stream);
  void set_low_water(mesh::Stream* stream);
  void read(mesh::Stream* stream, int64_t budget);
  bool on_header(mesh::Stream* stream);
  bool claim(mesh::Stream* stream);
  void on_payload(mesh::Stream* stream);
  // Events
  void watch(mesh::Stream* stream, uint32_t events);
  void unwatch(mesh::Stream* stream);
  bool is_error(mesh::Stream* stream, uint32_t events);
  void on_event(mesh::Stream* stream, uint32_t events);
  bool wait(int64_t deadline_ns);
  int64_t next_deadline(int64_t deadline_ns) const;
  // Signs of life, in mesh_watch.cpp
  bool watched(const mesh::Peer& peer) const;
  int64_t quiet_since(const mesh::Peer& peer) const;
  int64_t ping_after() const;
  void watch_peers();
  void ask(mesh::Peer* peer, int64_t now);
  int64_t patience(const mesh::Peer& peer) const;
  void answer(mesh::Stream* stream);
  void inspect(mesh::Peer* peer);
  // Failing
  void fail(Status first);
  void lose(mesh::Stream* stream, const std::string& how);
  void settle_losses();
  int64_t loss_deadline(const mesh::Peer& peer) const;
  // After the end, in mesh_ending.cpp
  void retire();
  bool any_lane() const;
  void end_lanes();
  void shut_down();
};

}  // namespace bagua
