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

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "transport/mesh_parts.h"

namespace bagua {

class Mesh {
 public:
  using Event = mesh::Event;
  using Completion = mesh::Completion;
  using Counters = mesh::Counters;
  static constexpr int kMaxStreams = mesh::kMaxStreams;
  static constexpr size_t kMaxMessage = mesh::kMaxMessage, kMaxControl = mesh::kMaxControl;
  static constexpr int64_t kDeadConnectionNs = mesh::kDeadConnectionNs;

  explicit Mesh(MeshOptions options);
  Mesh(const Mesh&) = delete;
  Mesh& operator=(const Mesh&) = delete;

  // Gives the mesh a connected, authenticated stream (see transport/handshake.h). Any thread. Closes the connection if
  // this stream is attached already, or if its number is out of range.
  void attach(int peer, int stream, Connection connection) { connections_.attach(peer, stream, std::move(connection)); }
  // True once every data stream to every other host is attached. Control lanes don't count.
  bool connected() {
    connections_.adopt();
    return connections_.complete();
  }

  // Starts the connect timeout for every host from `first` on, as a send to each would.
  void need_all(int first = 0);

  // Queues one chunk for `peer`, which need not be connected yet. `data` must stay readable until kSent. Frames to a
  // peer leave in the order of the calls.
  void send(int peer, uint64_t op, uint64_t tag, const void* data, size_t bytes, uint64_t cookie);
  // Posts the receive of one chunk: `data` must stay writable until kReceived. The length must be exactly the sender's.
  void recv(int peer, uint64_t op, uint64_t tag, void* data, size_t bytes, uint64_t cookie);
  // Queues a short message that needs no posted receive (descriptors, errors); it overtakes queued chunks.
  void send_control(int peer, const std::string& text);

  // True while the caller waits for other hosts: the mesh pings them.
  void set_waiting(bool waiting) { watch_.set_waiting(waiting); }
  // Takes the place of MeshOptions::silence_timeout_ns.
  void set_silence_timeout(int64_t ns) { shared_.options.silence_timeout_ns = ns; }
  // Takes the place of MeshOptions::first_word_timeout_ns.
  void set_first_word_timeout(int64_t ns) { shared_.options.first_word_timeout_ns = ns; }
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
  int failed_peer() const { return shared_.failed_peer; }
  // Peers that seem lost: the failed one, and all from which a word or a connection has been missing for half of the
  // time after which they would be lost. Where a network breaks, the first loss hides the others.
  std::vector<int> suspects(int64_t now_ns) const;

  // `peer` has said goodbye: it starts nothing new. The end of its connections is an error only if messages from it or
  // to it are still outstanding.
  void let_go(int peer) { shared_.peer(peer).let_go = true; }

  // From now on only control messages move, on the control lanes, even after an error. Drops queued sends and posted
  // receives. poll() fails again when no lane is left. Idempotent.
  void retire() { ending_.retire(); }
  // To be called when all hosts have said goodbye: retires the mesh, sends what is queued on the control lanes, then
  // closes this side of them. poll() fails when the other hosts have closed theirs.
  void hang_up() { ending_.hang_up(); }
  // True while control messages can go to `peer` on its control lane.
  bool can_tell(int peer) const { return mesh::can_tell(shared_.peers[static_cast<size_t>(peer)]); }
  // Ends every connection, also those that are attached later. Control messages that the sockets have taken still
  // arrive; everything else is dropped. poll() fails from now on. Idempotent.
  void shut_down() { ending_.shut_down(); }

  const Counters& counters() const { return shared_.totals; }
  // For error messages: names peers with outstanding sends or receives and since when, and peers that do not answer.
  std::string describe_waits(int64_t now_ns) const;

 private:
  bool check_peer(int peer, size_t bytes, size_t limit, const char* what);
  // Waits for events and handles them. Returns false if wake() was called.
  bool wait(int64_t deadline_ns);
  void on_event(mesh::Stream* stream, uint32_t events);
  int64_t next_deadline(int64_t deadline_ns) const;
  // Handles streams that have ended since the last call.
  void settle();

  mesh::Shared shared_;
  mesh::Poller poller_;
  mesh::Losses losses_;
  mesh::Outbox outbox_;
  mesh::Connections connections_;
  mesh::Intake intake_;
  mesh::Watch watch_;
  mesh::Ending ending_;
  std::atomic<bool> woken_{false};
};

}  // namespace bagua
