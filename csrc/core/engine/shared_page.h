// The engine's end of the JobPage that it shares with all local ranks (channel/layout.h): doorbell, counters, and the
// first error of the present generation.
//
// Thread safety: any thread after open(). begin(), show_error() and close() belong to one thread at a time.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/fd.h"
#include "base/status.h"
#include "channel/layout.h"
#include "channel/memory.h"
#include "engine/options.h"

namespace bagua {

class SharedPage {
 public:
  Status open(const std::vector<int>& local_ranks);
  // Nobody joins any more. The page stays mapped: counters and error can still be read.
  void close() { descriptor_.reset(); }

  int descriptor() const { return descriptor_.get(); }
  JobPage* get() const { return reinterpret_cast<JobPage*>(memory_->data()); }
  Counters& counters() const { return get()->counters; }

  // A generation begins: it has no error.
  void begin(const Membership& membership);
  // Ranks that wait, or submit something, see it at once.
  void show_error(const std::string& reason);
  // Wakes the dispatcher as a submission does.
  void ring_doorbell();
  // Nothing more comes from the local rank number `position`: whoever submits rings, so that those who need it hear of
  // it at once.
  void await_no_more(size_t position);

 private:
  Fd descriptor_;                    // constant from open() to close()
  std::shared_ptr<Mapping> memory_;  // constant after open()
};

}  // namespace bagua
