// The host's part of one job on one node: everything that core.pyi calls Engine. It owns the job's state and one
// generation at a time, which regroup() and plans replace; and beside it, at times, a lobby, a small generation of
// newcomers. On a node that is only about to join, the lobby is the present generation.
//
// Thread safety: any thread. Threads: the channel server, those of the generations, and in elastic engines one that
// carries out plans. A thread that calls a generation holds a reference, so that it stays until the call is over,
// perhaps ended by then. Lock order: see job_state.h.
#pragma once

#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "channel/server.h"
#include "engine/job/generation.h"
#include "engine/job/succession.h"
#include "engine/local/job_state.h"
#include "engine/values/options.h"
#include "engine/values/step_clock.h"

namespace bagua {

class Engine final : private ChannelHandler {
 public:
  // `first`: the generation with which the job begins here.
  static Status create(EngineOptions options, Membership first, std::unique_ptr<Engine>* out);
  ~Engine() override { close(); }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Elastic: ends the present generation, suspended or not, and opens the next one. Members that stay keep their
  // channels and memory, the port stays; what they have submitted and is not done ends as regrouped, and they enter
  // when they are ready. `tokens`: of members that are new here. All that belongs to members that are not in it any
  // more is freed. Residuals stay with communicators that come back with the same members. kInvalid: it can't follow,
  // and nothing has changed. Any other error: the engine has no generation that works.
  Status regroup(Membership next, const Tokens& tokens);
  // Elastic: the same after a step, when all members are there; see succession.h. Told by an event.
  Status plan(Plan plan);
  // Elastic: newcomers get a lobby.
  Status open_lobby(const std::vector<int>& members, const Tokens& tokens);

  const std::string& address() const { return job_.address(); }  // empty with one host
  Status set_peers(const std::vector<std::string>& addresses) { return generation()->set_peers(addresses); }
  int event_fd() const { return job_.events.fd(); }
  std::vector<Event> events() { return job_.events.take(); }
  std::string error() const { return generation()->state().error(); }
  std::string waiting(int64_t longer_than_ns) const;
  // How long a training step takes; 0: not known yet. Asked now and then.
  int64_t step_ns();
  // The job is over, suspended or not.
  void abort(const std::string& reason);
  // This host ends its part. Elastic jobs go on without it, at once; others are over.
  void withdraw(const std::string& reason);
  const Counters& counters() const { return job_.page.counters(); }
  // Local ranks see `request` (JobPage::trace), and this host's operations are recorded.
  void start_trace(uint64_t request, size_t most) {
    job_.trace.start(most);
    job_.page.ask_for_trace(request);
  }
  // See JobPage::fence.
  void set_fence(uint64_t at_ns) { job_.page.show_fence(at_ns); }
  std::pair<std::vector<TraceSpan>, uint64_t> stop_trace() {
    job_.page.ask_for_trace(0);
    return job_.trace.stop();
  }
  void close();

 private:
  Engine(EngineOptions options, const Membership& first) : job_(std::move(options)), succession_(first) {}
  Status open(Membership first);
  Status check_open() const REQUIRES(lifecycle_mutex_);
  // Ends the present generation, and the lobby if the next one takes its members, and opens the next one.
  Status follow(Membership next, const Tokens& tokens) REQUIRES(lifecycle_mutex_);
  void carry_out_plans();
  void carry_out(const Plan& plan) REQUIRES(lifecycle_mutex_);
  void note_absence(int member, bool lost);
  bool was_dismissed(int member);
  // `words`: how it ended, for people, where it is lost or has failed; `fault`: the program's, which ends elastic jobs.
  void note_gone(int member, Phase phase, const std::string& words = "", bool fault = false);
  std::shared_ptr<Generation> generation() const;
  std::shared_ptr<Generation> lobby() const;  // nullptr: there is none
  // The present generation, or the lobby if it is a member there.
  std::shared_ptr<Generation> generation_of(int member) const;

  // ChannelHandler, on the server's thread
  Status join(uint32_t member, const uint8_t* token, pid_t pid, Fd descriptors[3]) override;
  Status require(int member, uint64_t bytes) override;
  Status alloc(int member, uint64_t bytes, bool for_peers, Fd* descriptor, uint64_t* id, uint64_t* size) override;
  Status borrow(int member, uint32_t owner, uint64_t id, Fd* descriptor, uint64_t* size) override;
  Status adopt(int member, uint64_t id, const Fd& memory) override;
  Status free_segment(int member, uint64_t id) override;
  Status declare(int member, uint64_t comm, uint32_t generation, const std::vector<int>& ranks,
                 uint32_t* room) override;
  Status destroy(int member, uint64_t comm, uint32_t generation) override;
  Status enter(int member, uint64_t generation, Fd* descriptor) override;
  void left(int member, const std::string& words) override;
  void lost(int member, pid_t pid) override;
  void failed(int member, pid_t pid, bool lost, const std::string& text) override;
  void bad_connection() override;
  void scarce(const std::string& text) override;

  JobState job_;
  mutable Mutex generation_mutex_;                                        // guards the pointers alone
  std::shared_ptr<Generation> generation_ GUARDED_BY(generation_mutex_);  // never nullptr after open()
  std::shared_ptr<Generation> lobby_ GUARDED_BY(generation_mutex_);
  std::unique_ptr<ChannelServer> server_;  // constant from open() to close()

  Mutex lifecycle_mutex_;  // one change of generation or close() at a time; guards closed_
  Mutex regroup_mutex_;    // held while a generation is replaced, so that abort() ends the new one
  bool closed_ GUARDED_BY(lifecycle_mutex_) = false;

  Mutex succession_mutex_;
  Succession succession_ GUARDED_BY(succession_mutex_);
  bool closing_ GUARDED_BY(succession_mutex_) = false;
  Condition plan_may_be_due_;
  Mutex planner_mutex_;
  std::thread planner_ GUARDED_BY(planner_mutex_);

  Mutex pass_mutex_;
  PassClock pass_clock_ GUARDED_BY(pass_mutex_);
};

}  // namespace bagua
