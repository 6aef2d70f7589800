// Measures the bandwidths between the hosts of a communicator and agrees on the order of its ring.
//
// Only with kRingHosts hosts or more: with fewer all rings are alike. The result goes to Exchange::set_ring().
//
// Thread safety: the executor's thread only.
//
// Host 0 of the communicator decides and tells the others, which wait for its word before their first collective. For
// the world, whose hosts are connected from the start of the job, it has the bandwidths measured: in rounds of disjoint
// pairs (a round-robin tournament) it asks both hosts of a pair to measure what they can send to the other, both at the
// same time, as in a ring. A host sends messages over its data streams, longer and longer ones until they take long
// enough to be a measure, and each counts until the receiver's word that it is there. The rates go to host 0
// (collective/ring_order.h). Other communicators take the world's order without the hosts that are no members.
//
// A rate is bytes over time for a message of at most kMostBytes, its trip included: long distances count as slow, as
// they are for rings, in which every chunk makes 2 (hosts - 1) trips.
//
// Nothing waits for long: rounds end kLimitNs after the first began, then the hosts stay in their order. When a host
// says goodbye meanwhile they stay so, too. The loss of a host ends it as it ends everything on the mesh.
#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "collective/ring_order.h"
#include "engine/local/communicator.h"
#include "engine/local/generation_state.h"
#include "engine/remote/control.h"
#include "engine/remote/network.h"
#include "transport/mesh.h"

namespace bagua {

class RingSurvey {
 public:
  static constexpr int kRingHosts = 4;
  static constexpr size_t kFrameBytes = 64u << 10;    // a message is cut into frames of this length
  static constexpr size_t kFirstBytes = 16u << 10;    // the first message
  static constexpr size_t kMostBytes = 1u << 20;      // the longest one
  static constexpr int kRepeats = 3;                  // of the last length: the best counts
  static constexpr int kMostRepeats = 10;             // while all together took less than kEnoughNs
  static constexpr int64_t kEnoughNs = 20'000'000;    // what takes so long is long enough
  static constexpr int64_t kLimitNs = 5'000'000'000;  // for all rounds
  static constexpr uint64_t kSent = UINT64_MAX;       // cookies
  static constexpr uint64_t kReceived = UINT64_MAX - 1;
  static constexpr uint64_t kOperation = UINT64_MAX;  // of the frames; no other has this number

  RingSurvey(GenerationState* state, Network* network, const Communicator* comm, Mesh* mesh);

  bool settled() const { return settled_; }
  // Once settled: hosts of the communicator.
  const std::vector<int>& order() const { return order_; }

  // Goes on where something outside is waited for. `pending`: collectives wait for the order.
  void advance(bool pending);
  // When advance() is to be called again at the latest; -1: no time matters.
  int64_t deadline() const { return settled_ ? -1 : deadline_ns_; }
  // Messages of other hosts. kCorrupt: it makes no sense.
  Status hear(int peer, const message::Connected& connected);
  Status hear(int peer, const message::Measure& measure);
  Status hear(int peer, const message::Probe& probe);
  Status hear(int peer, const message::Probed& probed);
  Status hear(int peer, const message::Measured& measured);
  Status hear(int peer, const message::RingOrder& ring);
  // Mesh completions with one of the cookies above.
  void complete(uint64_t cookie);
  // Host `peer` takes its leave.
  void departing(int peer);
  // The executor ends: whoever waits for the world's order must not wait for ever.
  void give_up();

 private:
  void start_round();
  void settle_plain(const std::string& why);
  void tell(std::vector<int> order, const std::string& text);
  void settle(std::vector<int> order, const std::string& text);
  void from_world(bool pending);
  void begin(int target);
  void send_message();
  void arrived(int64_t now);
  void note_rate(int from, int to, double rate);
  void free_buffers();
  bool deciding() const { return comm_->topology().host == 0; }
  bool world() const { return comm_->id() == 0; }

  GenerationState* const state_;
  Network* const network_;
  const Communicator* const comm_;
  Mesh* const mesh_;

  bool settled_ = false;
  std::vector<int> order_;
  int64_t deadline_ns_ = -1;
  bool said_connected_ = false;

  // host 0 of the world
  std::set<int> unconnected_;  // hosts that have not said kConnected
  int round_ = 0;
  std::set<std::pair<int, int>> missing_;  // rates of this round: from, to
  collective::Bandwidths rates_;

  // measuring what this host can send
  int target_ = -1;
  size_t bytes_ = 0;     // of the message under way
  uint64_t number_ = 0;  // of messages
  int repeats_ = 0;
  int64_t last_ns_ = 0;  // all messages of this length together
  int64_t sent_ns_ = 0;
  double best_ = 0;  // bytes per second
  std::vector<char> out_;

  // answering
  int source_ = -1;
  uint64_t answer_ = 0;
  size_t frames_missing_ = 0;
  std::vector<char> in_;

  size_t in_flight_ = 0;  // frames that the mesh may still touch
};

}  // namespace bagua
