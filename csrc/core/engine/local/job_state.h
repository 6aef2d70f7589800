// State of one job on this host that outlives generations: settings, the shared page, the ranks' channels and memory,
// residuals, the listening port, events.
//
// Thread safety: any thread after open(), each part as its header says. open() and close() belong to the owner.
//
// Lock order in the engine, outermost first:
//   Engine::planner_mutex_ -> Engine::lifecycle_mutex_ -> Engine::regroup_mutex_ -> Engine::succession_mutex_, or
//   Engine::generation_mutex_ -> HostExecutor::join_mutex_ -> Registry::mutex_ -> Network::mutex_ ->
//   Communicator::mutex_ -> ExecutorInbox::mutex_ -> GenerationState::mutex_ -> the mutexes of this file's parts (each
//   alone).
// No lock is held while calling the kernel, polling the mesh or reading a socket.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "base/status.h"
#include "engine/local/ranks.h"
#include "engine/values/budget.h"
#include "engine/values/busy_clock.h"
#include "engine/values/events.h"
#include "engine/values/options.h"
#include "engine/values/residuals.h"
#include "engine/values/segments.h"
#include "engine/values/shared_page.h"
#include "engine/values/trace.h"

namespace bagua {

class JobState {
 public:
  explicit JobState(EngineOptions given) : options(std::move(given)) {}
  Status open();
  // A generation or lobby begins here, which does not run yet. `local_members`: of it, and of what goes on beside it.
  // Makes ports for new ones, with their tokens, and frees all that belongs to members that are in neither.
  void regroup(const std::vector<int>& local_members, const Tokens& tokens);
  // Gives back memory, channels and the port. No thread takes or completes operations any more.
  void close();

  Counters& counters() { return page.counters(); }
  SegmentTable& segments() { return *segments_; }
  Budget& budget() { return *budget_; }
  ResidualStore& residuals() { return *residuals_; }
  // Binds the job's TCP port on this host, and checks before any connection comes that encryption will work. Harmless
  // when it is bound. The address stays while generations come and go; connections that come between two of them wait
  // in the kernel.
  Status listen();
  int listener() const { return listener_.get(); }
  const std::string& address() const { return address_; }  // empty until listen()

  const EngineOptions options;
  SharedPage page;
  EventList events;
  BusyClock busy;
  Trace trace;
  RankTable ranks;

 private:
  Fd listener_;
  std::string address_;
  // Constant after open(). They count in the page.
  std::unique_ptr<SegmentTable> segments_;
  std::unique_ptr<Budget> budget_;
  std::unique_ptr<ResidualStore> residuals_;
};

}  // namespace bagua
