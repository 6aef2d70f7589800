// The engine's end of the pages that it shares with local ranks (channel/layout.h).
//
// Thread safety: any thread after open(). close() belongs to the owner; end() and await_no_more() to one thread at a
// time.
#pragma once

#include <memory>
#include <string>

#include "base/fd.h"
#include "base/status.h"
#include "channel/layout.h"
#include "channel/memory.h"
#include "engine/values/options.h"

namespace bagua {

// The JobPage: doorbell and counters of the job.
class SharedPage {
 public:
  Status open();
  // Nobody joins any more. The page stays mapped: counters can still be read.
  void close() { descriptor_.reset(); }

  int descriptor() const { return descriptor_.get(); }
  JobPage* get() const { return reinterpret_cast<JobPage*>(memory_->data()); }
  Counters& counters() const { return get()->counters; }

  // Wakes the dispatcher as a submission does.
  void ring_doorbell();
  // A generation has begun, or the job has ended: ranks that wait for either ask.
  void tell_change();
  // Ranks see that this generation is planned.
  void show_plan(uint64_t generation) { get()->planned.store(generation); }
  // See JobPage::fence.
  void show_fence(uint64_t at_ns) { get()->fence.store(at_ns, std::memory_order_relaxed); }
  // See JobPage::trace.
  void ask_for_trace(uint64_t request) { get()->trace.store(request, std::memory_order_relaxed); }

 private:
  Fd descriptor_;                    // constant from open() to close()
  std::shared_ptr<Mapping> memory_;  // constant after open()
};

// The GenerationPage: members of one generation, its first error, counters of its ranks.
class SharedSheet {
 public:
  Status open(const Membership& membership, bool elastic);

  int descriptor() const { return descriptor_.get(); }
  // Empties a room for a new communicator. No rank may be in it.
  void open_room(uint32_t room);
  // Ranks that wait, or submit something, see it at once.
  void end(GenerationStatus status, const std::string& reason);
  // Nothing more comes from the local rank number `position`: whoever submits rings, so that those who need it hear of
  // it at once.
  void await_no_more(size_t position);

 private:
  GenerationPage* get() const { return reinterpret_cast<GenerationPage*>(memory_->data()); }

  Fd descriptor_;                    // constant after open()
  std::shared_ptr<Mapping> memory_;  // constant after open()
};

}  // namespace bagua
