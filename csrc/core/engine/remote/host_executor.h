// The thread of one communicator that spans hosts: connects its mesh (Dialler), runs its operations there
// (host_loop.cpp), and takes leave of the other hosts (farewell.cpp).
//
// Thread safety: submit() and note_left() from the dispatcher; attach() from the threads of the network;
// start() from the owner; the rest from any thread. What is private is the executor's thread's, but for members that
// their own headers or the lines below give to others.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "engine/local/communicator.h"
#include "engine/local/generation_state.h"
#include "engine/remote/control.h"
#include "engine/remote/departures.h"
#include "engine/remote/dialler.h"
#include "engine/remote/exchange.h"
#include "engine/remote/executor_inbox.h"
#include "engine/remote/network.h"
#include "engine/remote/p2p.h"
#include "engine/remote/ring_survey.h"
#include "transport/mesh.h"

namespace bagua {

class HostExecutor final : public ConnectionTarget {
 public:
  // `comm` owns this executor.
  HostExecutor(GenerationState* state, Network* network, Communicator* comm);
  ~HostExecutor() override { close(); }

  void start();
  // Takes the operation; false, and nothing is taken, if this executor has ended.
  template <class Work>
  bool submit(Work* work) {
    if (!inbox_.put(work)) return false;
    wake();
    return true;
  }
  // Local rank `rank` has left, and all that it submitted has been given to submit().
  void note_left(int rank);
  // Something outside changed: the generation failed, peers are known.
  void wake() override;
  bool attach(int host, int stream, Connection connection) override;

  // How many collectives some other host has begun.
  uint64_t begun_elsewhere() const { return begun_elsewhere_.load(std::memory_order_acquire); }
  // Lines about operations that have waited for other hosts since before `before_ns`. Asks the thread, for at most
  // 200 ms.
  std::string describe(int64_t before_ns);

  // Leaves in good order; close() also waits for the thread. Idempotent.
  void begin_close();
  void close();
  bool over() const { return over_.load(std::memory_order_acquire); }  // the thread is about to end
  // Whether host `host` of the job has said that it begins nothing more here.
  bool has_departed(int host) const;

 private:
  void run();
  // Ends all that is not done.
  void abandon();
  int peer_of(int host) const;  // -1: no member
  // Polls the mesh, and adds its traffic to the counters of the job.
  Status poll(int64_t deadline_ns);

  // host_loop.cpp: operations come from the inbox, run over the mesh, and are completed. serve() returns when the
  // generation has failed, or the inbox is closing and all is done.
  void serve();
  bool idle() const { return exchange_.idle() && p2p_.idle(); }
  Status turn();
  void take_inbox();
  Status settle_ring();
  void follow_step();
  void tell_mesh_what_we_await();
  int64_t next_deadline() const;
  Status network_failed(const Status& status) const;
  int lost_host() const;  // whose loss failed the mesh; -1: none
  // The hosts with which this one can't talk, `host` (-1: none) among them.
  std::vector<int> accused(int host = -1) const;
  void dialling_failed();
  Status on_completion(const Mesh::Completion& completion);
  Status on_control(int peer, const Control& control);
  Status on_describe(int peer, const message::Describe& other);
  std::string describe_pending(int64_t before_ns) const;

  // farewell.cpp: sends the reason or a goodbye to the other hosts, and waits for theirs.
  // The communicator is destroyed here, and all that its members called is done. Returns when it is so everywhere, or
  // when the generation has failed.
  void await_others();
  // The generation has ended in good order.
  void leave();
  // The generation is suspended: tells the others, and hangs up at once. They need no last words, they regroup, too.
  void report_loss();
  // The generation has failed. Also after the mesh has failed: the lanes that still work carry the cause. A host that
  // could not be told, or does not listen, loses its connections to us: nobody waits for us for ever.
  void report_failure();
  Status listen(int64_t deadline_ns);
  void hear(const Mesh::Completion& completion);
  void converse(int64_t deadline_ns);

  GenerationState* const state_;
  Network* const network_;
  const Communicator* const comm_;
  ExecutorInbox inbox_;
  std::atomic<bool> over_{false};
  std::atomic<uint64_t> begun_elsewhere_{0};

  Mesh mesh_;
  Exchange exchange_;
  PointToPoint p2p_;
  RingSurvey survey_;
  Departures departures_;
  Dialler dialler_;
  Mesh::Counters counted_;     // of the mesh: in the job's counters already
  int64_t progress_ns_ = 0;    // when something arrived last
  int64_t step_ns_ = 0;        // that the limits of silence follow
  std::vector<bool> awaited_;  // by peer: a word from it is needed; kept for its memory
  std::vector<Mesh::Completion> completions_;

  Mutex join_mutex_;
  std::thread thread_ GUARDED_BY(join_mutex_);
};

}  // namespace bagua
