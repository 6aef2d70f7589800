// Tracks hosts and ranks that leave a communicator: their goodbyes, this host's own, and the operations that still need
// them.
//
// Thread safety: the executor's thread only, but has_departed().
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/local/communicator.h"
#include "engine/local/generation_state.h"
#include "engine/remote/control.h"
#include "engine/remote/exchange.h"
#include "engine/remote/p2p.h"
#include "engine/remote/ring_survey.h"
#include "transport/mesh.h"

namespace bagua {

class Departures {
 public:
  Departures(GenerationState* state, const Communicator* comm, Mesh* mesh, const Exchange* exchange, PointToPoint* p2p,
             RingSurvey* survey);

  // Another host begins nothing more: its first `done` collectives are done there; `why`, for people.
  void on_close(int peer, uint64_t done, const std::string& why);
  // It needs nothing more.
  void on_end(int peer) { peers_[static_cast<size_t>(peer)].heard_end = true; }
  // A rank there does nothing more.
  void on_left(const message::Left& left);

  // Lets hosts go when all that they have done is done here, too; ends the generation if something needs one of them
  // that it has not done. `progress_ns`: when something arrived last.
  void settle(int64_t progress_ns);
  // Tells the others which local ranks have left and have nothing pending.
  void tell_left(const std::vector<int>& left);
  // Tells the others that all local ranks do nothing more: `how`, for people.
  void tell_all_left(const std::string& how);
  // Tells the others that this host begins nothing more. Once.
  void tell_close(const std::string& why);
  void tell_all(const Control& control);
  // Answers a goodbye when this host is ending, too: neither needs the other any more.
  void part(int peer);
  // The same for all that said goodbye while this host was at work.
  void part_with_departed();
  // Of hosts that can't be told an error no answer is awaited.
  void give_up_unreachable();

  bool any_departed() const;  // some host has said that it begins nothing more
  bool all_departed() const;  // all have
  bool all_ended() const;     // none needs anything more
  // Whether the host with number `peer` in the communicator has said that it begins nothing more. Any thread.
  bool has_departed(int peer) const { return departed_[static_cast<size_t>(peer)].load(std::memory_order_acquire); }

 private:
  struct Peer {
    int64_t since_ns = -1;   // when it said that it begins nothing more; -1: still here
    bool answered = false;   // it was told that it is not needed any more
    bool heard_end = false;  // it needs nothing more
    uint64_t done = 0;       // collectives that it has done
    std::string why;
  };

  void settle(int peer, int64_t progress_ns);
  void tell_left(int rank, const std::string& how);
  bool is_told(int rank) const;
  bool self(size_t peer) const { return static_cast<int>(peer) == comm_->topology().host; }

  GenerationState* const state_;
  const Communicator* const comm_;
  Mesh* const mesh_;
  const Exchange* const exchange_;
  PointToPoint* const p2p_;
  RingSurvey* const survey_;

  std::vector<Peer> peers_;
  std::unique_ptr<std::atomic<bool>[]> departed_;  // by peer: since_ns >= 0
  std::vector<int> told_left_;                     // local ranks
  bool told_close_ = false;
};

}  // namespace bagua
