// One communicator of the leg: chooses the route of each operation and owns the routes.
//
// Thread safety: any thread may call submit(). One thread calls open() and close(), while no other submits.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "gpu/leg/flat_route.h"
#include "gpu/leg/hierarchical_route.h"
#include "gpu/leg/host_collectives.h"
#include "gpu/leg/operation.h"
#include "gpu/leg/operation_table.h"
#include "gpu/leg/operations_in_flight.h"
#include "gpu/leg/staged_route.h"
#include "gpu/leg/watcher.h"

namespace bagua::device {

// The ranks of a communicator, in the same order at all of them.
struct Members {
  uint32_t comm = 0;
  std::vector<int> ranks;  // global, sorted
  std::vector<int> host;   // of each member: index of its host
  int index = 0;           // of this rank
  bool everyone = false;   // all ranks of the job

  int size() const { return static_cast<int>(ranks.size()); }
  bool on_one_host() const { return host.front() == host.back(); }
  // Members on the same host as `index`, by their index.
  std::vector<int> neighbours() const;
  // The same number of members, more than one, on each of several hosts.
  bool regular() const;
  // "0, 1, 2"
  std::string names() const;
};

// Capabilities of a rank. Members exchange them, byte for byte, before they choose routes.
struct Facts {
  uint32_t version = 3;
  int32_t nccl_version = 0;  // 0: none
  uint8_t kernels = 0, staged = 0, named_host = 0;
  uint8_t forced = 0;   // 1 + Route; 0: choose by measurement
  uint8_t divides = 0;  // NCCL's communicators can have children, and are to have some that block
  char bus[32] = {};    // PCI bus id of the GPU
  char no_nccl[192] = {}, no_staged[192] = {};
};

// Routes that a communicator can't take, each with the reason; the same at all members.
struct Excluded {
  std::map<Route, std::string> impossible;  // because of the members and their capabilities
  std::map<Route, std::string> failed;      // because their set-up failed
  std::string undivided;                    // why communicators of NCCL have no children that block, which they should
};

class Communicator {
 public:
  Communicator(Runtime* runtime, OperationTable* table, Watcher* watcher, Members members);
  ~Communicator();  // after close()

  // Agrees with the other members on a route and sets it up; waits for them. `forced`: 1 + Route, or 0. A forced route
  // that is impossible is an error at all members. But a communicator of some of the ranks chooses for itself if the
  // forced route makes no sense for its shape (hierarchical inside one host).
  Status open(uint8_t forced);
  // Checks that there is a route for the operation. All members get the same error, before anything is enqueued.
  Status check(const Operation& operation) const;
  // Enqueues a checked operation behind the caller's stream.
  Status submit(Operation* operation, CudaStream stream);
  // Orderly end: waits until all operations are done or the leg has failed. False: see StagedRoute::close().
  bool close();

  // True if no operation is pending.
  bool quiet();

  Route route() const { return route_; }
  const Excluded& excluded() const { return excluded_; }
  const Members& members() const { return members_; }

 private:
  using Handles = std::vector<std::shared_ptr<NcclHandle>>;

  Status gather_facts(HostCollectives* daemon, uint8_t forced, std::vector<Facts>* all);
  Status choose(const std::vector<Facts>& all, std::vector<Route>* candidates);
  std::string shape_forbids(Route route) const;
  void look_at(const std::vector<Facts>& all);
  Status refuse(Route wanted, const std::string& why) const;
  Status set_up(HostCollectives* daemon, Route route);
  Status make_ids(HostCollectives* daemon, bool maker, int leader, size_t count, std::vector<NcclId>* ids,
                  std::string* why);
  Status connect(HostCollectives* daemon, bool flat, Handles* made, std::string* why);
  Status divide(HostCollectives* daemon, const Handles& handles, Handles* children, std::string* why);
  Status await(HostCollectives* daemon, const Handles& handles, Status mine, std::string* why);
  Status agree(HostCollectives* daemon, const Status& mine, std::string* why);
  Status finish_flat(const Handles& handles);
  Status finish_hierarchical(const Handles& handles);
  Status make_across();
  Status measure(HostCollectives* daemon, const std::vector<Route>& candidates);
  void drop_slower();
  Status time_route(Route route, void* data, uint64_t bytes, double* seconds);
  void drop_nccl();

  Route route_of(const Operation& operation) const;
  Status submit_on(Route route, Operation* operation, CudaEvent begin) REQUIRES(mutex_);
  Status staged_for(const Operation& operation, StagedRoute** staged) REQUIRES(mutex_);
  bool settled() const;

  Runtime* const runtime_;
  OperationTable* const table_;
  Watcher* const watcher_;
  const Members members_;
  // constant after open()
  Route route_ = Route::kStaged;
  Excluded excluded_;
  bool kernels_ = true;  // all members have the kernels
  bool divides_ = true;  // all members make children of NCCL's communicators
  uint32_t across_ = 0;  // the daemon's communicator of the hierarchical route; 0: none

  OperationsInFlight in_flight_;

  // constant between open() and close()
  std::map<Route, Handles> handles_;  // with parents, which no route uses
  std::unique_ptr<FlatRoute> flat_;
  std::unique_ptr<HierarchicalRoute> hierarchical_;

  Mutex mutex_;  // also makes the order of operations the same on all streams
  std::map<int64_t, std::unique_ptr<StagedRoute>> staged_ GUARDED_BY(mutex_);
};

}  // namespace bagua::device
