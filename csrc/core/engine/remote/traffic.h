// Adds the traffic of one mesh to the counters of the job.
//
// Thread safety: the executor's thread only.
#pragma once

#include <atomic>
#include <cstdint>

#include "channel/layout.h"
#include "transport/mesh.h"

namespace bagua {

class TrafficCount {
 public:
  TrafficCount(const Mesh* mesh, Counters* counters) : mesh_(mesh), counters_(counters) {}

  // Counts everything since the last call.
  void update() {
    const Mesh::Counters now = mesh_->counters();
    const auto add = [](std::atomic<uint64_t>* total, uint64_t after, uint64_t before) {
      total->fetch_add(after - before, std::memory_order_relaxed);
    };
    add(&counters_->bytes_sent, now.bytes_sent, counted_.bytes_sent);
    add(&counters_->bytes_received, now.bytes_received, counted_.bytes_received);
    add(&counters_->bytes_encrypted, now.bytes_encrypted, counted_.bytes_encrypted);
    add(&counters_->frames_refused, now.frames_refused, counted_.frames_refused);
    add(&counters_->frames_dropped, now.frames_dropped, counted_.frames_dropped);
    counted_ = now;
  }

 private:
  const Mesh* const mesh_;
  Counters* const counters_;
  Mesh::Counters counted_;
};

}  // namespace bagua
