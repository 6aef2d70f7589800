// Phases of this host's collectives, recorded while somebody asks for them: who was waited for, what was computed, and
// what crossed the wire. Off it costs one relaxed read for each step of an operation.
//
// Thread safety: any thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"

namespace bagua {

// Times in ns of CLOCK_MONOTONIC.
struct TraceSpan {
  // "operation" from the first local rank's submission to the results; inside it "ranks" (waiting for the last local
  // rank: peer), "queued" and "host" (waiting until that host has begun it: peer); and its steps: "reduce", "copy",
  // "encode", "decode", "send" and "receive" (peer: host).
  const char* phase = "";
  std::string name;  // of the operation: "bucket 3", or its kind
  uint32_t comm = 0;
  uint64_t sequence = 0;  // of its communicator
  int64_t begin_ns = 0, end_ns = 0;
  int peer = -1;  // rank or host of the generation; -1: none
  uint64_t bytes = 0;
};

class Trace {
 public:
  bool on() const { return on_.load(std::memory_order_relaxed); }

  // Forgets what was recorded, and records `most` spans; later ones are counted.
  void start(size_t most) {
    const Lock lock(mutex_);
    spans_.clear();
    dropped_ = 0;
    most_ = most;
    on_.store(true, std::memory_order_relaxed);
  }
  void note(TraceSpan span) {
    const Lock lock(mutex_);
    if (!on()) return;
    if (spans_.size() < most_) {
      spans_.push_back(std::move(span));
    } else {
      ++dropped_;
    }
  }
  // Ends it: the spans, and how many there was no room for.
  std::pair<std::vector<TraceSpan>, uint64_t> stop() {
    const Lock lock(mutex_);
    on_.store(false, std::memory_order_relaxed);
    std::vector<TraceSpan> taken;
    taken.swap(spans_);
    return {std::move(taken), dropped_};
  }

 private:
  Mutex mutex_;
  std::atomic<bool> on_{false};  // set under mutex_
  size_t most_ GUARDED_BY(mutex_) = 0;
  uint64_t dropped_ GUARDED_BY(mutex_) = 0;
  std::vector<TraceSpan> spans_ GUARDED_BY(mutex_);
};

}  // namespace bagua
