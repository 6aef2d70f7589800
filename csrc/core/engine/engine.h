// The host leg of one job on one node: everything that core.pyi calls Engine. It owns the job's state and one
// generation at a time, which regroup() replaces.
//
// Thread safety: any thread. Threads: the channel server, and those of the generation. A thread that calls the
// generation holds a reference, so that it stays until the call is over, as one that has ended. Lock order: see
// job_state.h.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "channel/server.h"
#include "engine/generation.h"
#include "engine/job_state.h"
#include "engine/options.h"

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

  const std::string& address() const { return job_.listener().address(); }  // empty with one host
  Status set_peers(const std::vector<std::string>& addresses) { return generation()->set_peers(addresses); }
  int event_fd() const { return job_.events().fd(); }
  std::vector<Event> events() { return job_.events().take(); }
  std::string error() const { return generation()->error(); }
  std::string waiting(int64_t longer_than_ns) const { return generation()->waiting(longer_than_ns); }
  // The job is over, suspended or not.
  void abort(const std::string& reason);
  const Counters& counters() const { return job_.page().counters(); }
  void close();

 private:
  explicit Engine(EngineOptions options) : job_(std::move(options)) {}
  Status open(Membership first);
  Status open_generation(Membership membership, const Generation* last);
  void note_gone(int member, Phase phase);
  std::shared_ptr<Generation> generation() const;

  // ChannelHandler, on the server's thread
  Status join(uint32_t member, const uint8_t* token, pid_t pid, Fd descriptors[3]) override;
  Status require(int member, uint64_t bytes) override;
  Status alloc(int member, uint64_t bytes, Fd* descriptor, uint64_t* id, uint64_t* size) override;
  Status free_segment(int member, uint64_t id) override;
  Status declare(int member, uint64_t comm, const std::vector<int>& ranks) override;
  Status destroy(int member, uint64_t comm) override;
  Status enter(int member, uint64_t generation, Fd* descriptor) override;
  void left(int member) override;
  void lost(int member, pid_t pid) override;
  void bad_connection() override;

  JobState job_;
  mutable Mutex generation_mutex_;                                        // guards the pointer alone
  std::shared_ptr<Generation> generation_ GUARDED_BY(generation_mutex_);  // never nullptr after open()
  std::unique_ptr<ChannelServer> server_;                                 // constant from open() to close()

  Mutex lifecycle_mutex_;  // one regroup() or close() at a time; guards closed_
  Mutex regroup_mutex_;    // a generation that is aborted is the one that stays
  bool closed_ GUARDED_BY(lifecycle_mutex_) = false;
};

}  // namespace bagua
