// How long a training step takes, seen from its operations: each of them comes again once in a step, so it is the
// median time after which one does.
//
// Thread safety: one thread.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string_view>
#include <unordered_map>

#include "channel/layout.h"

namespace bagua {

class StepClock {
 public:
  // An operation was begun.
  void note(const Descriptor& operation, int64_t now_ns) {
    if (last_.size() >= kMostKinds) last_.clear();
    const auto [found, first] = last_.insert({signature(operation), now_ns});
    if (first) return;
    times_[noted_++ % times_.size()] = now_ns - found->second;
    found->second = now_ns;
  }
  // 0: not known yet.
  int64_t median() const {
    auto sorted = times_;
    const auto end = sorted.begin() + std::min<ptrdiff_t>(noted_, kTimes),
               middle = sorted.begin() + (end - sorted.begin()) / 2;
    if (sorted.begin() == end) return 0;
    std::nth_element(sorted.begin(), middle, end);
    return *middle;
  }

 private:
  static constexpr ptrdiff_t kTimes = 15;
  static constexpr size_t kMostKinds = 1024;  // a program whose operations all differ costs no memory

  static size_t signature(const Descriptor& operation) {
    const std::string_view label(operation.label, sizeof operation.label);
    const size_t call = operation.count << 16 | uint64_t{operation.kind} << 8 | operation.dtype;
    return (std::hash<std::string_view>()(label) * 31 + operation.comm) * 31 + call;
  }

  std::unordered_map<size_t, int64_t> last_;
  std::array<int64_t, kTimes> times_{};
  ptrdiff_t noted_ = 0;
};

// A clock for steps that never reach the daemon (channel/meeting.h): it counts the backward passes that ranks have
// begun. Call look() about once a second.
class PassClock {
 public:
  // Median time of a pass over the last looks that found new ones; 0: not known yet.
  int64_t look(uint64_t passes, int64_t now_ns) {
    if (passes == passes_) return median();
    if (passes_ != 0 && passes > passes_) {  // a program takes its time before the first
      times_[noted_++ % times_.size()] = (now_ns - at_ns_) / static_cast<int64_t>(passes - passes_);
    }
    at_ns_ = now_ns;
    passes_ = passes;
    return median();
  }

 private:
  int64_t median() const {
    auto sorted = times_;
    const auto known = static_cast<ptrdiff_t>(std::min(noted_, times_.size()));
    std::nth_element(sorted.begin(), sorted.begin() + known / 2, sorted.begin() + known);
    return known == 0 ? 0 : sorted[static_cast<size_t>(known / 2)];
  }

  uint64_t passes_ = 0;
  int64_t at_ns_ = 0;
  std::array<int64_t, 15> times_{};
  size_t noted_ = 0;
};

}  // namespace bagua
