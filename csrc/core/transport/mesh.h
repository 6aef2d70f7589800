// Tagged messages between the hosts of one communicator, over several authenticated TCP streams per pair of hosts.
//
// Thread safety: one thread, the communicator's, drives a Mesh. Other threads may only call wake() and attach().
//
// A message is one chunk of one operation, identified by (op, tag), of at most kMaxMessage bytes. It is sent as one
// frame, on the stream where it is expected to arrive first (stream_rate.h). Header and payload have checksums, or are
// sealed if the connection is encrypted (seal.h). A frame whose receive is not posted yet is "parked": it stays in the
// socket and blocks this stream alone. TCP then holds the sender back, which bounds memory without credits. Senders
// send in an order in which receivers post (see collective/program.h), so parking can't cause a deadlock.
//
// Control lane: a pair of hosts has one TCP stream more than `streams`, attached as stream number `streams`. It carries
// control messages only, so that no parked or slow chunk delays them and they arrive in the order in which they were
// sent. Its keep-alive finds a vanished host even while chunks are in flight.
//
// Silence: the kernel of a stopped or starved process still acknowledges every byte. So while the caller waits
// (set_waiting()), a peer with a control lane is pinged after each second of silence, and its driving thread answers in
// poll(). A peer that has nothing to send answers; a stopped one does not. A connection whose bytes are no longer
// acknowledged (a cut cable) is lost after kDeadConnectionNs.
//
// Loss of a peer: messages that have arrived are delivered first (kReceived, kControl), then poll() fails. From then on
// the mesh does not touch posted buffers, and sends nothing until retire(). After retire() working control lanes can
// carry the cause to the other hosts; shut_down() makes their poll() fail in any case.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "transport/seal.h"
#include "transport/stream_count.h"

namespace bagua {

struct MeshOptions {
  std::string job_id;
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

class Mesh {
 public:
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

  static constexpr int kMaxStreams = 64;
  static constexpr size_t kMaxMessage = 16u << 20;
  static constexpr size_t kMaxControl = 64u << 10;  // the caller must not send longer texts or longer chunks
  static constexpr int64_t kDeadConnectionNs = 20'000'000'000;

  explicit Mesh(MeshOptions options);
  ~Mesh();
  Mesh(const Mesh&) = delete;
  Mesh& operator=(const Mesh&) = delete;

  // Gives the mesh a connected, authenticated stream (see transport/handshake.h). Any thread. Closes the connection if
  // this stream is attached already, or if its number is out of range.
  void attach(int peer, int stream, Connection connection);
  // True once every data stream to every other host is attached. Control lanes don't count.
  bool connected() const;

  // Starts the connect timeout for every host, as a send to each would.
  void need_all();

  // Queues one chunk for `peer`, which need not be connected yet. `data` must stay readable until kSent. Frames to a
  // peer leave in the order of the calls.
  void send(int peer, uint64_t op, uint64_t tag, const void* data, size_t bytes, uint64_t cookie);
  // Posts the receive of one chunk: `data` must stay writable until kReceived. The length must be exactly the sender's.
  void recv(int peer, uint64_t op, uint64_t tag, void* data, size_t bytes, uint64_t cookie);
  // Queues a short message that needs no posted receive (descriptors, errors); it overtakes queued chunks.
  void send_control(int peer, const std::string& text);

  // True while the caller waits for other hosts: the mesh pings them.
  void set_waiting(bool waiting);
  // Takes the place of MeshOptions::silence_timeout_ns.
  void set_silence_timeout(int64_t ns);
  // Takes the place of MeshOptions::first_word_timeout_ns.
  void set_first_word_timeout(int64_t ns);
  // By peer: the caller waits for a control message from it. The loss of such a peer is an error even while frames that
  // it sent before wait for their receives.
  void set_awaited(const std::vector<bool>& peers);

  // Moves bytes until there is a completion, wake() was called, or the deadline (CLOCK_MONOTONIC, ns; < 0: none) has
  // passed; appends completions to `out`. Errors of send(), recv() and send_control() are returned here, too. An error
  // names the peer and is final for this mesh: a lost or closed connection, a wrong checksum, an invalid header, or a
  // length that differs from the posted one.
  Status poll(int64_t deadline_ns, std::vector<Completion>* out);
  // Makes the present or next poll() return. Any thread.
  void wake();
  // The peer whose loss or silence was the error of poll(); -1: it was none.
  int failed_peer() const;

  // `peer` has said goodbye: it starts nothing new. The end of its connections is an error only if messages from it or
  // to it are still outstanding.
  void let_go(int peer);

  // From now on only control messages move, on the control lanes, even after an error. Drops queued sends and posted
  // receives. poll() fails again when no lane is left. Idempotent.
  void retire();
  // To be called when all hosts have said goodbye: retires the mesh, sends what is queued on the control lanes, then
  // closes this side of them. poll() fails when the other hosts have closed theirs.
  void hang_up();
  // True while control messages can go to `peer` on its control lane.
  bool can_tell(int peer) const;
  // Ends every connection, also those that are attached later. Control messages that the sockets have taken still
  // arrive; everything else is dropped. poll() fails from now on. Idempotent.
  void shut_down();

  const Counters& counters() const;
  // For error messages: names peers with outstanding sends or receives and since when, and peers that do not answer.
  std::string describe_waits(int64_t now_ns) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace bagua
