// Estimates how fast a stream drains, from TCP's acknowledgements, and picks the stream for the next chunk.
//
// A chunk that was handed to a socket can't be taken back. So it goes to the stream on which it should arrive first,
// and it waits if it would arrive much later there than on a busy stream: receivers reduce chunks in order, so one late
// chunk soon delays all.
#pragma once

#include <cstddef>
#include <cstdint>

namespace bagua {

class StreamRate {
 public:
  static constexpr int64_t kSampleNs = 1'000'000;      // shorter intervals are too noisy
  static constexpr int64_t kSmoothNs = 10'000'000;     // time constant of the mean
  static constexpr int64_t kForgetNs = 2'000'000'000;  // the assumed rate of an unused stream doubles in this time
  static constexpr double kUnknown = -1;

  bool due(int64_t now) const { return now - sampled_ns_ >= kSampleNs; }
  // Takes in a sample: at time `now` the socket has taken `written` bytes in total; `queued` of them are
  // unacknowledged.
  void sample(int64_t now, uint64_t written, uint64_t queued);
  // Bytes that the socket has taken and that were not acknowledged at the last sample.
  uint64_t backlog(uint64_t written) const { return written - acknowledged_; }
  uint64_t arrived() const { return acknowledged_; }  // bytes, at the last sample
  // Bytes per second; kUnknown before the first measurement.
  double rate(int64_t now) const;

 private:
  int64_t sampled_ns_ = 0;
  int64_t measured_ns_ = 0;  // when the rate was last measured under load
  uint64_t acknowledged_ = 0;
  bool busy_ = false;  // bytes were queued at the last sample
  double rate_ = kUnknown;
};

// One stream that could carry a chunk.
struct StreamLoad {
  bool free;       // can take a chunk now
  double rate;     // bytes per second, StreamRate::kUnknown if not known
  double backlog;  // bytes that it has taken and that have not arrived
};

// Returns the index of the stream for the next chunk, of `chunk` bytes; -1: wait, because a stream that is busy now
// should deliver it earlier. `queued`: bytes that wait for a stream, this chunk included. Ties go to the first stream
// at or after `begin`.
int choose_stream(const StreamLoad* streams, int count, int begin, double chunk, double queued);

}  // namespace bagua
