// One communicator of the leg: which route its operations take, and what the routes need.
//
// Thread safety: submit() any thread; open() and close() one thread, when nobody submits.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "device/daemon.h"
#include "device/flat.h"
#include "device/hierarchical.h"
#include "device/lane.h"
#include "device/operation.h"
#include "device/table.h"
#include "device/watcher.h"

namespace bagua::device {

// Who takes part, as everybody sees it.
struct Members {
  uint32_t comm = 0;
  std::vector<int> ranks;  // global, sorted
  std::vector<int> host;   // of each member: index of its host
  int index = 0;           // of this rank

  int size() const { return static_cast<int>(ranks.size()); }
  bool on_one_host() const { return host.front() == host.back(); }
  // Members on the same host as `index`, by their index.
  std::vector<int> neighbours() const;
  // The same number of members, more than one, on each of several hosts.
  bool regular() const;
};

// What a rank says about itself before routes are chosen. Travels between ranks as it is.
struct Facts {
  uint32_t version = 1;
  int32_t nccl_version = 0;  // 0: none
  uint8_t kernels = 0, staged = 0, named_host = 0;
  uint8_t forced = 0;  // 1 + Route; 0: by measurement
  char bus[32] = {};   // PCI bus id of the GPU
};

class Group {
 public:
  Group(Runtime* runtime, OperationTable* table, Watcher* watcher, Members members);
  ~Group();  // after close()

  // Agrees with the other members on a route and makes what it needs; waits for them. `forced`: 1 + Route, or 0.
  Status open(uint8_t forced);
  // Enqueues a checked operation behind the caller's stream.
  Status submit(Operation* operation, CudaStream stream);
  // In good order: waits until everything submitted is done or the leg has failed. False: see Lane::close.
  bool close();

  // Nothing is pending.
  bool quiet();

  Route route() const { return route_; }
  const Members& members() const { return members_; }

 private:
  Status gather_facts(Daemon* daemon, uint8_t forced, std::vector<Facts>* all);
  Status choose(const std::vector<Facts>& all, std::vector<Route>* candidates);
  Status make_handles(Daemon* daemon, const std::vector<Route>& candidates);
  Status make_nccl(bool flat, bool hierarchical, const std::vector<NcclId>& ids);
  Status make_across();
  Status measure(Daemon* daemon, const std::vector<Route>& candidates);
  Status time_route(Route route, uint64_t bytes, double* seconds);
  void drop_nccl();

  Route route_of(const Operation& operation) const;
  Status submit_on(Route route, Operation* operation, CudaEvent begin);
  Status lane_for(const Operation& operation, Lane** lane);
  bool settled() const;

  Runtime* const runtime_;
  OperationTable* const table_;
  Watcher* const watcher_;
  const Members members_;
  Route route_ = Route::kStaged;  // constant after open()
  bool kernels_ = true;           // all members have them; constant after open()
  uint32_t across_ = 0;           // the daemon's communicator of the hierarchical route; 0: none

  std::mutex mutex_;  // guards what follows, and the order of enqueuing
  std::vector<std::shared_ptr<NcclHandle>> handles_;
  std::unique_ptr<Flat> flat_;
  std::map<int64_t, std::unique_ptr<Lane>> lanes_;
  std::unique_ptr<Hierarchical> hierarchical_;
};

}  // namespace bagua::device
