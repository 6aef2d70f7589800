// State shared by all parts of a generation: its members, how it ended, and measurements of its links.
//
// Thread safety: any thread.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "engine/local/job_state.h"
#include "engine/values/options.h"
#include "transport/stream_count.h"

namespace bagua {

// Somebody that a generation has lost.
struct Loss {
  std::string text;
  int member = -1;                // -1: no single one
  int host = -1;                  // index of the host; -1: none
  bool none = false;              // nobody: the next generation begins
  std::vector<int> accused = {};  // hosts with which this one can't talk, as it has seen itself
};

class GenerationState {
 public:
  struct Local {
    int rank;
    std::shared_ptr<Port> port;  // also of a generation that has ended, which a request may still hold
  };

  // The job has ports for the local members. `last`: the generation before; nullptr: there was none.
  GenerationState(JobState* job, Membership membership, const GenerationState* last);
  Status open() { return sheet_.open(membership_, job_->options.elastic); }
  void open_room(uint32_t room) { sheet_.open_room(room); }

  JobState& job() const { return *job_; }
  const Membership& membership() const { return membership_; }
  const SharedSheet& sheet() const { return sheet_; }
  const std::vector<Local>& locals() const { return locals_; }
  Phase phase(int rank) const;  // of a local rank

  // Each of these ends a generation; the dispatcher then ends what is pending.
  // It fails with this reason, if it was running.
  void fail(const std::string& reason) { fail({reason}, State::kRunning); }
  // It fails with this reason, if it was running or suspended: the job is over.
  void abort(const std::string& reason) { fail({reason}, State::kSuspended); }
  // The same when its owner ends it: no event, and other hosts are told that this one leaves in good order.
  void end(const std::string& reason);
  // It can't go on without somebody. In an elastic job it is suspended: its operations end as regrouped, and the next
  // one is to follow. In others it fails.
  void lose(const Loss& loss);
  // The next one follows: its operations end as regrouped, and no event tells of it.
  void retire(const std::string& reason);

  bool over() const { return state_.load(std::memory_order_acquire) != State::kRunning; }
  bool suspended() const { return state_.load(std::memory_order_acquire) == State::kSuspended; }
  bool ended() const { return state_.load(std::memory_order_acquire) == State::kEnded; }
  // How operations end that are not done when it is over.
  Outcome outcome() const { return suspended() ? Outcome::kRegrouped : Outcome::kFailed; }
  std::string error() const;  // empty: it is running or suspended
  Loss loss() const;          // that ended it; also the words where nobody was lost
  bool lost() const;          // it is suspended since it has lost somebody

  // A local rank does nothing more.
  void await_no_more(int rank);

  // The verdict on the number of streams to host `host`.
  StreamVerdict* stream_verdict(int host) { return stream_verdicts_[static_cast<size_t>(host)].get(); }

  uint64_t passes() const;  // backward passes that a local rank has begun

  // The median training step of an elastic job, of the generation before until this one knows; 0: not known yet.
  int64_t step_ns() const { return step_ns_.load(std::memory_order_relaxed); }
  void set_step_ns(int64_t step_ns) { step_ns_.store(step_ns, std::memory_order_relaxed); }

  // This host has newcomers alone: members come when their step is over, however long that takes.
  bool comes_first() const { return comes_first_; }

  // The order in which rings go round the hosts. The first one stays.
  void set_ring(std::vector<int> order);
  // Empty: not known yet.
  std::vector<int> ring() const;
  // The order that was measured in earlier generations, if it names all hosts of this one.
  const std::vector<int>& kept_ring() const { return kept_ring_; }

 private:
  enum class State : int { kRunning, kSuspended, kFailed, kEnded };

  bool stop(State state, State latest, const Loss& loss);
  void fail(const Loss& loss, State latest);
  void suspend(const Loss& loss);
  void inherit(const GenerationState& last);

  JobState* const job_;
  const Membership membership_;
  std::vector<Local> locals_;                                    // constant after construction, like the next two
  std::vector<std::shared_ptr<StreamVerdict>> stream_verdicts_;  // by host
  std::vector<int> kept_ring_;
  bool comes_first_ = false;  // constant after construction
  SharedSheet sheet_;

  mutable Mutex mutex_;
  Loss loss_ GUARDED_BY(mutex_);
  std::vector<int> ring_ GUARDED_BY(mutex_);
  std::atomic<State> state_{State::kRunning};  // set after loss_
  std::atomic<int64_t> step_ns_{0};
};

}  // namespace bagua
