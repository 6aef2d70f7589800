// The thread that takes operations from the ranks, checks and matches them, runs local ones, and hands the others to
// the communicators' executors. It sleeps on the doorbell.
//
// Thread safety: start() and stop() belong to the owner; everything else runs on the dispatcher's thread.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "engine/job/circle.h"
#include "engine/job/registry.h"
#include "engine/local/generation_state.h"
#include "engine/local/local_executor.h"
#include "engine/local/ranks.h"
#include "engine/values/step_clock.h"

namespace bagua {

class Dispatcher {
 public:
  Dispatcher(GenerationState* state, Registry* registry);
  ~Dispatcher() { stop(); }

  void start();
  // Ends the threads; what is still pending is ended if the generation is over. Idempotent.
  void stop();
  // Returns when it has taken all that was submitted before the call, or after that time: ranks that are not the last
  // to submit do not wake it. Returns at once when the thread has ended. Any thread.
  void look(int64_t longest_ns);

 private:
  void run();
  bool take_all();
  void handle(Operation operation, std::vector<std::shared_ptr<Communicator>>* touched);
  void advance(const std::shared_ptr<Communicator>& comm);
  std::vector<int> departed_ranks() const;
  void check_departed(const std::vector<int>& departed);
  void flush();
  void note_step(const Collective& operation);
  // Ends the generation if local ranks wait for each other in a circle.
  void check_circle();
  // Why an operation needs a local rank that has left, and what to do.
  std::string left_text(int left, const std::string& needed_by) const;
  void sleep(uint32_t seen);
  void reject(const Operation& operation) const;

  GenerationState* const state_;
  SharedPage* const page_;
  Registry* const registry_;
  std::unique_ptr<LocalExecutor> local_;  // has threads of its own, from start() to stop()
  const int spins_;

  std::atomic<bool> stopping_{false};
  std::atomic<uint32_t> rounds_{0};  // of taking all; futex word of look()
  std::atomic<int> lookers_{0};
  StepClock steps_;  // dispatcher's thread only, like the next two
  Circle circle_;
  int64_t looked_ns_ = 0;  // for a circle
  std::thread thread_;
};

}  // namespace bagua
