// What all parts of an engine share: its settings, the job page, the first error, events for the daemon, the busy
// clock.
//
// Thread safety: everything here may be used from any thread. Lock order in the engine, outermost first:
//   Engine::lifecycle_mutex_ -> HostExecutor::join_mutex_ -> Registry::mutex_ ->
//   Network::mutex_ -> Communicator::mutex_ -> HostExecutor::mutex_ -> the mutexes of this file (each alone).
// No lock is held while calling the kernel, polling the mesh or reading a socket.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/fd.h"
#include "base/status.h"
#include "channel/layout.h"
#include "channel/memory.h"
#include "transport/handshake.h"
#include "transport/stream_count.h"

namespace bagua {

struct EngineOptions {
  uint64_t generation = 0;
  int host_index = 0;
  std::vector<std::vector<int>> hosts;  // ranks of every host, in ring order
  std::string data_socket;
  std::vector<std::pair<int, std::vector<uint8_t>>> tokens;  // local rank, 32 bytes
  Credentials credentials;
  std::string listen;
  int streams = 4;
  size_t chunk_bytes = 512 * 1024;
  int threads = 0;
  bool zero_copy = false;     // large chunks leave without a copy into the kernel; see transport/zero_copy.h
  uint64_t memory_limit = 0;  // bytes of tensor memory; 0: none but the host's
  int64_t connect_timeout_ns = 30'000'000'000;
  int64_t peer_timeout_ns = 30'000'000'000;  // silence of a host that is waited for; see transport/mesh.h
  bool measure_ring = true;                  // that of host 0 counts; see ring_survey.h

  const std::vector<int>& local_ranks() const { return hosts[static_cast<size_t>(host_index)]; }
};

// kInvalid in words if the settings do not fit together.
Status check_options(const EngineOptions& options);

struct Event {
  const char* kind;  // "joined", "left", "lost", "error", "ring"
  int rank;          // -1: none
  std::string text;
};

// Length of the union of intervals.
class BusyClock {
 public:
  void start(int64_t now);
  void stop(int64_t now, std::atomic<uint64_t>* total);

 private:
  std::mutex mutex_;
  int running_ = 0;
  int64_t since_ = 0;
};

class EngineState {
 public:
  explicit EngineState(EngineOptions options) : options_(std::move(options)), stream_verdicts_(options_.hosts.size()) {}
  Status open();

  const EngineOptions& options() const { return options_; }
  JobPage* page() const { return reinterpret_cast<JobPage*>(page_memory_->data()); }
  int page_descriptor() const { return page_fd_.get(); }
  // Nobody joins any more. The page stays mapped: counters and error can still be read.
  void close_page() { page_fd_.reset(); }
  Counters& counters() const { return page()->counters; }
  BusyClock& busy() { return busy_; }

  // Makes the engine fail with this reason; false if it had failed before. The dispatcher then ends what is pending.
  bool fail(const std::string& reason);
  // The same when the owner closes the engine: no event, and other hosts are told that this one leaves in good order.
  void end(const std::string& reason);
  bool ended() const { return ended_.load(std::memory_order_acquire); }
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  std::string error() const;

  void tell(const char* kind, int rank, const std::string& text);
  std::vector<Event> take_events();
  int event_fd() const { return events_ready_.fd(); }

  // What is known about the streams to host `host` of the job. Any thread.
  StreamVerdict* stream_verdict(int host) { return &stream_verdicts_[static_cast<size_t>(host)]; }

  // The order in which rings go round the hosts of the job. The first one stays.
  void set_ring(std::vector<int> order);
  // Empty: not known yet.
  std::vector<int> ring() const;

  // Nothing more comes from this rank: whoever submits rings, so that those who need it hear of it at once.
  void await_no_more(int rank);
  // Wakes the dispatcher as a submission does.
  void ring_doorbell();

 private:
  const EngineOptions options_;
  std::vector<StreamVerdict> stream_verdicts_;  // by host; never resized
  Fd page_fd_;                                  // constant from open() to close_page()
  std::shared_ptr<Mapping> page_memory_;        // constant after open()
  EventFd events_ready_;                        // constant after open()
  BusyClock busy_;

  bool set_error(const std::string& reason, bool ended);

  mutable std::mutex mutex_;  // guards the next three
  std::string error_;
  std::vector<Event> events_;
  std::vector<int> ring_;
  std::atomic<bool> failed_{false};  // set after error_
  std::atomic<bool> ended_{false};   // the first error is the end; set before failed_
};

}  // namespace bagua
