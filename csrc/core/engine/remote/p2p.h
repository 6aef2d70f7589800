// Sends and receives between ranks of different hosts.
//
// The receiver posts its memory, then tells the sender's host that it is ready; the sender transmits only then. So a
// message never lies in a socket in front of the chunks of a collective. For a receive from any source all hosts are
// asked to tell of sends that wait for it; then it becomes a receive from the rank that was named first.
//
// Thread safety: the executor's thread only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "engine/local/communicator.h"
#include "engine/local/generation_state.h"
#include "engine/remote/control.h"
#include "transport/mesh.h"

namespace bagua {

class PointToPoint {
 public:
  static constexpr uint64_t kCookie = uint64_t{1} << 63;  // marks our cookies and operations among the mesh's

  PointToPoint(GenerationState* state, Communicator* comm, Mesh* mesh) : state_(state), comm_(comm), mesh_(mesh) {}

  // kInvalid names both sides if the other end is ready for something else.
  Status add(SendOrRecv half);
  Status ready(int peer, const message::Ready& other);
  // Has the other hosts tell of sends to this target.
  void seek(const Communicator::Target& target);
  Status on_seek(int peer, const message::Seek& other);
  Status on_offer(int peer, const message::Offer& other);
  // Rank `index` of the communicator does nothing more in it, after `sends` sends to ranks of this host. Some may still
  // be on their way: the word of its leaving overtakes them. `how`: for people, "has left the job in good order".
  void left(int index, uint64_t sends, const std::string& how) { gone_[index] = {sends, how}; }
  // How many sends of member `index` to ranks of host `peer` have begun.
  uint64_t sends_begun(int index, int peer) const;
  // Names an operation whose other end has left; empty if there is none.
  std::string needs_departed() const;
  void complete(uint64_t cookie);
  // Marks the hosts whose ranks have not said that they are ready for a send that has been called.
  void mark_awaited(std::vector<bool>* peers) const;
  bool idle() const { return waiting_.empty() && running_.empty(); }
  bool pending(int rank) const;       // of a local rank
  bool pending_with(int peer) const;  // with ranks of that host
  std::string describe_pending(int64_t now, int64_t before_ns) const;
  void abandon();

 private:
  friend struct Remembered;  // of a test

  using Route = Communicator::Route;
  struct Gone {
    uint64_t sends;
    std::string how;
  };
  struct Transfer {
    SendOrRecv half;
    size_t remaining = 0;  // chunks
    int64_t started_ns = 0;
  };

  // Whether member `index` exists, on that host.
  bool is_on(uint32_t index, int host) const;
  Status can_not_be(int peer, const char* what) const;
  // Tells the destination's host of the sends of this route so far.
  void offer(const Route& route);
  Status begin_send(SendOrRecv half, const message::Ready& other);
  void begin(SendOrRecv half);
  void finish(uint64_t id, Transfer* transfer);
  std::string describe(const SendOrRecv& half, int64_t now) const;
  static Route route_of(const SendOrRecv& half) {
    return {half.source, half.destination, half.operation.descriptor.tag};
  }
  // Whether `judge` is true of something that waits or runs. All that wait on a route have the same rank and ends.
  template <class Judge>
  bool any_pending(const Judge& judge) const {
    return std::any_of(waiting_.begin(), waiting_.end(), [&](const auto& of) { return judge(of.second.front()); }) ||
           std::any_of(running_.begin(), running_.end(), [&](const auto& one) { return judge(one.second.half); });
  }
  // Calls `look` with every send that waits.
  template <class Look>
  void each_waiting(const Look& look) const {
    for (const auto& [route, sends] : waiting_) {
      for (const SendOrRecv& half : sends) look(half);
    }
  }

  GenerationState* const state_;
  Communicator* const comm_;
  Mesh* const mesh_;

  // One of these two is empty for a route, and what is empty is not kept: programs may take a new tag for every
  // message.
  std::map<Route, std::deque<SendOrRecv>> waiting_;    // sends whose receiver is not ready
  std::map<Route, std::deque<message::Ready>> ready_;  // receivers that are ready before the send was called
  std::map<uint64_t, Transfer> running_;               // by number: moving, or receives that are posted
  std::map<int, Gone> gone_;                           // by index: what left() was told
  std::map<std::pair<int, int>, uint64_t> sent_;       // by source and host: sends begun
  std::map<int, uint64_t> received_;                   // by source: receives that ended
  std::map<std::pair<int, int>, uint64_t> posted_;     // by source and destination: receives so far
  // Of whose sends other hosts are told. By source: sends so far, without those that belong to receives before the
  // seek.
  std::map<Communicator::Target, std::map<int, int64_t>> sought_;
  uint64_t next_id_ = 1;
};

}  // namespace bagua
