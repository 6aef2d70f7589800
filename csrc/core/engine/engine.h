// The host leg of one job on one node for one generation: everything that core.pyi calls Engine.
//
// Thread safety: any thread. Threads: the channel server, the dispatcher, worker helpers; with several hosts also the
// network's acceptor and one executor per communicator that spans hosts. Lock order: see state.h.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "channel/server.h"
#include "engine/budget.h"
#include "engine/dispatcher.h"
#include "engine/network.h"
#include "engine/ranks.h"
#include "engine/registry.h"
#include "engine/segments.h"
#include "engine/state.h"

namespace bagua {

class Engine final : private ChannelHandler {
 public:
  static Status create(EngineOptions options, std::unique_ptr<Engine>* out);
  ~Engine() override { close(); }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  std::string address() const { return network_.address(); }
  Status set_peers(const std::vector<std::string>& addresses);
  int event_fd() const { return state_.event_fd(); }
  std::vector<Event> events() { return state_.take_events(); }
  std::string error() const { return state_.error(); }
  std::string waiting(int64_t longer_than_ns) const;
  void abort(const std::string& reason) { state_.fail(reason); }
  const Counters& counters() const { return state_.counters(); }
  void close();

 private:
  explicit Engine(EngineOptions options);
  Status open();
  void prepare(Communicator* comm);
  void close_executors();
  void retire(const std::shared_ptr<Communicator>& comm);
  void take_submitted(int64_t longest_ns) const;

  // ChannelHandler, on the server's thread
  Status join(uint32_t rank, const uint8_t* token, pid_t pid, int descriptors[2]) override;
  Status require(int rank, uint64_t bytes) override;
  Status alloc(int rank, uint64_t bytes, Fd* descriptor, uint64_t* id, uint64_t* size) override;
  Status free_segment(int rank, uint64_t id) override;
  Status declare(int rank, uint64_t comm, const std::vector<int>& members) override;
  Status destroy(int rank, uint64_t comm) override;
  void left(int rank) override;
  void lost(int rank, pid_t pid) override;
  void bad_connection() override;

  EngineState state_;
  std::unique_ptr<SegmentTable> segments_;  // constant after open(), like the next ones
  std::unique_ptr<Budget> budget_;
  RankTable ranks_;
  Network network_;
  Registry registry_;
  std::unique_ptr<Dispatcher> dispatcher_;
  std::unique_ptr<ChannelServer> server_;

  mutable std::mutex lifecycle_mutex_;  // guards the next one
  bool closed_ = false;
};

}  // namespace bagua
