// Gives memory back to the kernel on a thread of its own: that takes up to 0.5 ms for each MiB, and ranks wait for the
// next generation meanwhile.
//
// Thread safety: any thread; the destructor waits until all is given back.
#pragma once

#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "channel/memory.h"

namespace bagua {

class Reaper {
 public:
  using Memory = std::vector<std::shared_ptr<Mapping>>;

  ~Reaper();
  // Lets go of it soon. What an operation still uses stays until that is over.
  void take(Memory memory);
  // Returns when all that was taken has been let go.
  void finish();

 private:
  void run();

  Mutex mutex_;
  Condition changed_;
  Memory left_ GUARDED_BY(mutex_);
  bool busy_ GUARDED_BY(mutex_) = false;
  bool ending_ GUARDED_BY(mutex_) = false;
  std::thread thread_ GUARDED_BY(mutex_);  // from the first take()
};

}  // namespace bagua
