// Which staged operations may be at the daemon: the channel has kSlots for those of this rank. What comes when all are
// taken leaves when another one is back, in its turn.
//
// Thread safety: any thread. Calls no CUDA.
#pragma once

#include <deque>
#include <mutex>

#include "channel/layout.h"

namespace bagua::device {

struct Operation;
class Lane;

class Departures {
 public:
  // Calls Lane::leave now, or from `back`.
  void depart(Operation* operation);
  // An operation that has left is over.
  void back();
  // Those of the lane that wait for their turn don't leave any more.
  void forget(const Lane* lane);

 private:
  static constexpr uint32_t kMost = kSlots * 3 / 4;  // the others are for operations on the host's memory

  std::mutex mutex_;  // guards what follows; held while operations leave, so that they do in their order
  uint32_t away_ = 0;
  std::deque<Operation*> queue_;
};

}  // namespace bagua::device
