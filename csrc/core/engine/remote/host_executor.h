// The thread of one communicator that spans hosts: connects its mesh (Dialler), runs its operations there (HostLoop),
// and takes leave of the other hosts (Farewell).
//
// Thread safety: submit() and note_left() from the dispatcher; attach() from the threads of the network;
// start() from the owner; the rest from any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <thread>

#include "base/mutex.h"
#include "engine/local/communicator.h"
#include "engine/local/generation_state.h"
#include "engine/remote/departures.h"
#include "engine/remote/dialler.h"
#include "engine/remote/exchange.h"
#include "engine/remote/executor_inbox.h"
#include "engine/remote/farewell.h"
#include "engine/remote/host_loop.h"
#include "engine/remote/inquiry.h"
#include "engine/remote/network.h"
#include "engine/remote/p2p.h"
#include "engine/remote/ring_survey.h"
#include "engine/remote/traffic.h"
#include "transport/mesh.h"

namespace bagua {

class HostExecutor final : public ConnectionTarget {
 public:
  // `comm` owns this executor.
  HostExecutor(GenerationState* state, Network* network, Communicator* comm);
  ~HostExecutor() override { close(); }

  void start();
  // Takes the operation; false, and nothing is taken, if this executor has ended.
  bool submit(Collective* operation);
  bool submit(Communicator::Between* one);
  // Local rank `rank` has left, and all that it submitted has been given to submit().
  void note_left(int rank);
  // Something outside changed: the generation failed, peers are known.
  void wake() override;
  bool attach(int host, int stream, Connection connection) override;

  uint64_t begun_elsewhere() const { return loop_.begun_elsewhere(); }
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

  GenerationState* const state_;
  Network* const network_;
  const Communicator* const comm_;
  ExecutorInbox inbox_;
  Inquiry inquiry_;
  std::atomic<bool> over_{false};

  // Of the executor's thread, but for what their headers say.
  Mesh mesh_;
  Exchange exchange_;
  PointToPoint p2p_;
  RingSurvey survey_;
  TrafficCount traffic_;
  Departures departures_;
  Dialler dialler_;
  HostLoop loop_;
  Farewell farewell_;

  Mutex join_mutex_;
  std::thread thread_ GUARDED_BY(join_mutex_);
};

}  // namespace bagua
