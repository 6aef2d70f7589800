// The thread of one communicator that spans hosts: connects its mesh and runs its operations there.
//
// Thread safety: submit(), note_left() and begun_elsewhere() from the dispatcher; attach() from the network's threads;
// wake(), describe(), begin_close() and close() from any thread; everything else belongs to the executor's own thread.
// mutex_ guards the inbox.
//
// Ends. The engine fails: tell the other hosts why, give them a moment to hear it, fail what is pending. The engine is
// closed: say so, wait until nobody needs us any more (bounded), go. The communicator is destroyed here: say so, and
// keep the connections until it is destroyed on all other hosts: they may be far behind, still read what was sent
// before, or talk to each other. Another host has said either: what it has done is finished here, too; an operation
// that it has not done fails.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "engine/communicator.h"
#include "engine/exchange.h"
#include "engine/network.h"
#include "engine/p2p.h"
#include "engine/ranks.h"
#include "engine/ring_survey.h"
#include "engine/state.h"
#include "transport/mesh.h"

namespace bagua {

class HostExecutor final : public ConnectionTarget {
 public:
  // `comm` owns this executor.
  HostExecutor(EngineState* state, RankTable* ranks, Network* network, const Communicator* comm);
  ~HostExecutor() override { close(); }

  void start();
  // Takes the operation; false, and nothing is taken, if this executor has ended.
  bool submit(Collective* operation);
  bool submit(SendOrRecv* half);
  // Local rank `rank` has left, and all that it submitted has been given to submit().
  void note_left(int rank);
  // Something outside changed: the engine failed, peers are known.
  void wake() override;
  bool attach(int host, int stream, Connection connection) override;

  uint64_t begun_elsewhere() const { return begun_elsewhere_.load(std::memory_order_acquire); }
  // Lines about what waits for other hosts since before `before_ns`. Asks the thread, for at most 200 ms.
  std::string describe(int64_t before_ns);

  // Leaves in good order; close() also waits for the thread. Idempotent.
  void begin_close();
  void close();
  bool over() const { return over_.load(std::memory_order_acquire); }  // the thread is about to end
  // Whether host `host` of the job has said that it begins nothing more here. Any thread.
  bool has_departed(int host) const;

 private:
  void run();
  bool await_peers();
  bool dial_all();
  Status dial(int peer, int stream, int64_t deadline_ns);
  void serve();
  void take_inbox();
  void say_who_left();
  void say_left(int rank, const std::string& how);
  bool idle();
  bool turn();
  Status settle_ring();
  void tell_mesh_what_we_await();
  bool network_failed(const Status& status);
  Status on_completion(const Mesh::Completion& completion);
  Status on_control(int peer, const Control& control);
  void watch_departures();
  int64_t next_deadline() const;
  void answer_description();
  void say_close(const std::string& why);
  void await_others();
  bool all_departed() const;
  void leave();
  void report_failure();
  void hear(const Mesh::Completion& completion);
  void depart(int peer, const Control& control);
  void part(int peer);
  void converse(int64_t deadline_ns);
  void finish();
  void stay_until_closed();
  void tell_all(const Control& control);
  void count_traffic();
  std::string host_text(int peer) const;
  std::string name_hosts(const std::string& text) const;
  bool closing() const { return closing_.load(std::memory_order_acquire) || state_->ended(); }

  EngineState* const state_;
  RankTable* const ranks_;
  Network* const network_;
  const Communicator* const comm_;
  Mesh mesh_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Collective> collectives_;  // guarded by mutex_, like all up to closed_
  std::deque<SendOrRecv> halves_;
  std::vector<int> left_;
  int64_t first_submit_ns_ = -1;
  bool ended_ = false;
  bool describe_wanted_ = false;
  int64_t describe_before_ns_ = 0;
  std::string description_;

  std::atomic<bool> closing_{false};
  std::atomic<bool> over_{false};
  std::atomic<uint64_t> begun_elsewhere_{0};
  std::unique_ptr<std::atomic<bool>[]> has_departed_;  // by peer
  std::mutex join_mutex_;
  std::thread thread_;  // guarded by join_mutex_ after start()

  // executor's thread only
  Exchange exchange_;
  PointToPoint p2p_;
  RingSurvey survey_;
  struct Departure {
    int64_t since_ns = -1;  // -1: still here
    bool answered = false;
    uint64_t done = 0;  // collectives that it has done
    std::string why;
  };
  std::vector<Departure> departures_;  // by peer
  std::vector<bool> awaited_;          // by peer: a word from it is needed; kept for its memory
  std::vector<bool> heard_end_;        // by peer: said kError or kClosed
  std::vector<int> left_seen_;         // copy of left_
  std::vector<int> told_left_;         // those whose leaving the others know
  int64_t progress_ns_ = 0;
  bool said_close_ = false;
  Mesh::Counters counted_;
  std::vector<Mesh::Completion> completions_;
};

}  // namespace bagua
