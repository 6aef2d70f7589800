// Tagged messages between the hosts of one communicator, over several authenticated TCP streams per pair of hosts.
//
// Thread safety: a Mesh is driven by one thread, the communicator's. Only wake() and attach() may be called from
// others.
//
// A message is one chunk of one operation, named by (op, tag) and at most kMaxMessage bytes. A chunk travels as one
// frame on the stream to that host where it is expected to arrive first (stream_rate.h); both parts are checksummed, or
// sealed where the connection is encrypted (seal.h). A frame whose receive is not posted yet stays in the socket
// ("parked"): it blocks that stream alone, and TCP holds the sender back, so that memory is bounded without credits.
// Senders send in an order that receivers post (see collective/program.h), so parking can't deadlock.
//
// Control lane: a pair of hosts may have one TCP stream more than `streams`, attached as stream number `streams`. It
// carries control messages only, so that a parked or slow chunk never holds one up, and its keep-alive notices a host
// that vanished without a word even while chunks are in flight. Without it control messages share the data streams.
//
// Silence: while the caller says that it waits (set_waiting()), a peer with a control lane is asked for a sign of life
// once a second of silence; its driving thread answers in poll(). So a host that is stopped or starved, whose kernel
// still acknowledges every byte, is told from one that is alive and merely has nothing to send. A connection on which
// nothing is acknowledged any more (a cut cable) is lost after kDeadConnectionNs.
//
// Loss of a peer: what had already arrived is delivered first (kReceived, kControl), then poll() fails. After poll()
// has failed the mesh touches no posted buffer any more, and says nothing to anybody until retire(): the control lanes
// that still work can then carry the cause to the other hosts, and shut_down() makes their poll() fail in any case.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "transport/connection.h"
#include "transport/stream_count.h"
#include "transport/zero_copy.h"

namespace bagua {

struct MeshOptions {
  std::string job_id;
  uint64_t generation = 0;
  uint32_t comm = 0;
  int host = 0;  // index of this host among the hosts of the communicator
  int hosts = 1;
  int streams = 4;                              // TCP streams for each pair of hosts
  int64_t connect_timeout_ns = 30'000'000'000;  // from the first send or recv with a peer that is not connected
  int64_t silence_timeout_ns = 30'000'000'000;  // for an answer from a peer, while waiting
  // The same for a peer that has never spoken: it may make this communicator much later.
  int64_t first_word_timeout_ns = INT64_MAX / 4;
  // By peer: what is known about the streams to that host, see transport/stream_count.h; must outlive the mesh. Empty:
  // nothing is known.
  std::vector<StreamVerdict*> verdicts = {};
  // An operation whose messages nobody misses when their peer has said goodbye.
  uint64_t spare_operation = UINT64_MAX;
  // Name of host `peer` in errors and descriptions; empty: "host 1".
  std::function<std::string(int peer)> name = {};
  ZeroCopyMode zero_copy = ZeroCopyMode::kOff;  // of large chunks, on plain data streams; see transport/zero_copy.h
};

class Mesh {
 public:
  enum class Event : uint8_t {
    kSent,      // the payload of a send may be reused: the kernel does not read it any more
    kReceived,  // the payload of a recv is in place and its checksum right
    kControl,   // a control message arrived: see `control`
  };
  struct Completion {
    Event event;
    int peer;
    uint64_t cookie;      // what send() or recv() was given
    std::string control;  // kControl only
  };
  struct Counters {
    uint64_t bytes_sent = 0, bytes_received = 0;  // payload and headers
    uint64_t bytes_encrypted = 0;                 // of bytes_sent
    uint64_t frames_dropped = 0;                  // of another generation or communicator
    uint64_t frames_refused = 0;                  // damaged or not authentic; the first ends the mesh
    uint64_t zero_copy_bytes = 0;                 // of bytes_sent, those asked to be sent without a copy
    uint64_t zero_copy_off = 0;                   // streams that have gone back to copying
  };

  static constexpr int kMaxStreams = 64;
  static constexpr size_t kMaxMessage = 16u << 20;
  static constexpr size_t kMaxControl = 64u << 10;  // a longer text is an error of the caller, as is a longer chunk
  static constexpr int64_t kDeadConnectionNs = 20'000'000'000;

  explicit Mesh(MeshOptions options);
  ~Mesh();
  Mesh(const Mesh&) = delete;
  Mesh& operator=(const Mesh&) = delete;

  // Gives the mesh a connected, authenticated stream (see transport/handshake.h). Any thread. A stream that is there
  // already or a number out of range closes the connection.
  void attach(int peer, int stream, Connection connection);
  // True once every data stream to every other host is there (the control lanes are not counted).
  bool connected() const;

  // From now on every host must connect within the timeout, as if something were sent to each.
  void need_all();

  // Queues one chunk for `peer` (before it is connected, too). `data` must stay readable until kSent. Frames to a peer
  // leave in the order of the calls.
  void send(int peer, uint64_t op, uint64_t tag, const void* data, size_t bytes, uint64_t cookie);
  // Posts the receive of one chunk: `data` must stay writable until kReceived. The length must be exactly the sender's.
  void recv(int peer, uint64_t op, uint64_t tag, void* data, size_t bytes, uint64_t cookie);
  // A short message that needs no posted receive (descriptors, errors); it overtakes queued chunks.
  void send_control(int peer, const std::string& text);

  // True while the caller waits for other hosts in whatever way: they are asked for signs of life.
  void set_waiting(bool waiting);
  // By peer: the caller waits for a control message from it. The loss of such a peer is an error even while frames that
  // it sent before wait for their receives.
  void set_awaited(const std::vector<bool>& peers);

  // Errors of send(), recv() and send_control() come from the next poll(). Moves bytes until at least one completion is
  // there, wake() was called or the deadline (CLOCK_MONOTONIC, ns; < 0: none) has passed; appends to `out`. An error
  // names the peer and is final for this mesh: a lost or closed connection, a checksum that is wrong, a length that
  // differs from the posted one, a header that is not ours.
  Status poll(int64_t deadline_ns, std::vector<Completion>* out);
  // Makes a poll() in progress (or the next) return. Any thread.
  void wake();
  // The peer whose loss or silence was the error of poll(); -1: it was none.
  int failed_peer() const;

  // `peer` has said goodbye: it sends nothing new and needs nothing more. The end of its connections is an error only
  // for what is still to come from it or to go to it.
  void let_go(int peer);

  // From now on, after an error too, only control messages move, on the control lanes; what was queued or posted is
  // forgotten. poll() fails again when no lane is left. Idempotent.
  void retire();
  // Everybody has said goodbye: retires, and ends this side of the control lanes when all that was queued has gone.
  // poll() fails when the others have done so, too.
  void hang_up();
  // True while control messages can go to `peer` on its control lane.
  bool can_tell(int peer) const;
  // Ends every connection, those of a later attach() too. Control messages that are in the sockets still arrive, the
  // rest is thrown away. poll() fails from now on. Idempotent.
  void shut_down();

  Counters counters() const;
  // Bytes sent to `peer` on each data stream (0: not attached). The driving thread's alone.
  std::vector<uint64_t> stream_bytes(int peer) const;
  // For error messages: peers with sends or receives outstanding, and since when; peers that do not answer.
  std::string describe_waits(int64_t now_ns) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace bagua
