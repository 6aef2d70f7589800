// Estimates how fast a stream drains, from TCP's acknowledgements, and picks the stream for the next chunk.
//
// A chunk that is handed to a socket can't be taken back. So it goes where it is expected to arrive first, and not at
// all onto a stream on which it would arrive much later than the others could carry it: receivers reduce chunks in
// order, and one late chunk soon holds up all.
#pragma once

#include <cstddef>
#include <cstdint>

namespace bagua {

class StreamRate {
 public:
  static constexpr int64_t kSampleNs = 1'000'000;      // shorter intervals say nothing
  static constexpr int64_t kSmoothNs = 10'000'000;     // time constant of the mean
  static constexpr int64_t kForgetNs = 2'000'000'000;  // an unused stream is thought twice as fast after each of these
  static constexpr double kUnknown = -1;

  bool due(int64_t now) const { return now - sampled_ns_ >= kSampleNs; }
  // At time `now` the socket had taken `written` bytes since its beginning, `queued` of which are not acknowledged.
  void sample(int64_t now, uint64_t written, uint64_t queued);
  // Bytes handed to the socket that are not known to have arrived.
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
  bool free;       // takes a chunk now
  double rate;     // bytes per second, StreamRate::kUnknown if not known
  double backlog;  // bytes handed to it before
};

// The index of the stream that should carry the next chunk of `chunk` bytes, -1: none that is free, wait for another.
// `queued`: bytes that wait for a stream, that chunk included. Ties go to the first at or after `begin`. At least one
// stream that is not free is then expected to become free.
int choose_stream(const StreamLoad* streams, int count, int begin, double chunk, double queued);

}  // namespace bagua
