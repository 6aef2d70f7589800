// Opens a communicator: its members choose a route together and create NCCL's communicators, streams and memory.
#include <poll.h>
#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "base/clock.h"
#include "gpu/leg/communicator.h"

namespace bagua::device {

namespace {

constexpr uint32_t kAcross = 0x80000000u;  // first number of the communicators that the leg makes for itself
constexpr uint32_t kMostLocal = 256;
constexpr uint64_t kMeasured[] = {256 << 10, 8 << 20};  // bytes of an all-reduce
constexpr int kRounds = 3;                              // the first one is a warm-up

constexpr size_t kWords = 256;  // length of a member's reason, in bytes
constexpr int kTold = 4;        // members whose reasons are shown
constexpr int kLongestPauseMs = 32;

bool contains(const std::vector<Route>& routes, Route route) {
  return std::find(routes.begin(), routes.end(), route) != routes.end();
}

template <size_t kBytes>
void put(char (&out)[kBytes], const std::string& text) {
  strncpy(out, text.c_str(), kBytes - 1);
}

}  // namespace

Status Communicator::gather_facts(HostCollectives* daemon, uint8_t forced, std::vector<Facts>* all) {
  const Libraries& libraries = runtime_->libraries;
  Facts mine;
  mine.nccl_version = libraries.has_nccl() ? libraries.nccl_version : 0;
  mine.kernels = libraries.has_kernels();
  mine.staged = runtime_->no_wait_value().empty();
  mine.named_host = getenv("NCCL_HOSTID") != nullptr;
  mine.forced = forced;
  mine.divides = runtime_->nccl_blocks && libraries.nccl.split != nullptr;
  if (!libraries.has_nccl()) put(mine.no_nccl, libraries.why_not.at("nccl"));
  put(mine.no_staged, runtime_->no_wait_value());
  Status status = runtime_->cuda(libraries.cuda.pci_bus_id(mine.bus, sizeof(mine.bus) - 1, runtime_->device),
                                 "asking for the PCI bus id");
  if (!status) {  // the others wait for this rank's facts, so they are told
    mine.nccl_version = mine.staged = 0;
    put(mine.no_nccl, status.message());
    put(mine.no_staged, status.message());
  }
  all->resize(members_.ranks.size());
  return daemon->all_gather(&mine, all->data(), sizeof(Facts), members_.size());
}

std::string Communicator::shape_forbids(Route route) const {
  if (route != Route::kHierarchical) return "";
  if (!members_.regular()) return "its members are not the same number, 2 or more, on each of several hosts";
  if (members_.comm >= kAcross / kMostLocal || members_.neighbours().size() >= kMostLocal) {
    return "only communicators of all ranks, with fewer than 256 on a host, have numbers for it";
  }
  return "";
}

// Finds the reasons against each route. They follow from the facts of all members, so they are the same everywhere.
void Communicator::look_at(const std::vector<Facts>& all) {
  const auto name = [this](size_t i) { return "rank " + std::to_string(members_.ranks[i]); };
  std::string nccl, staged, shared;
  for (size_t i = 0; i < all.size(); ++i) {
    kernels_ = kernels_ && all[i].kernels != 0;
    divides_ = divides_ && all[i].divides != 0;
    if (staged.empty() && all[i].staged == 0) staged = name(i) + ": no waits on memory: " + all[i].no_staged;
    if (nccl.empty() && all[i].nccl_version == 0) nccl = name(i) + ": no NCCL: " + all[i].no_nccl;
    if (nccl.empty() && all[i].nccl_version != all[0].nccl_version) {
      nccl = name(0) + " has NCCL " + std::to_string(all[0].nccl_version) + ", " + name(i) + " has " +
             std::to_string(all[i].nccl_version);
    }
    for (size_t k = 0; k < i && shared.empty(); ++k) {
      const bool same =
          members_.host[i] == members_.host[k] && strncmp(all[i].bus, all[k].bus, sizeof(all[i].bus)) == 0;
      if (!same || (all[i].named_host != 0 && all[k].named_host != 0)) continue;
      shared = name(k) + " and " + name(i) + " share a GPU, which NCCL takes only with an NCCL_HOSTID for each";
    }
  }
  const auto add = [this](Route route, std::initializer_list<std::string> reasons) {
    for (const std::string& reason : reasons) {
      if (!reason.empty()) excluded_.impossible.emplace(route, reason);
    }
  };
  // If the route is forced, NCCL decides whether it accepts several ranks on one GPU.
  const bool chosen = all[0].forced != 0;
  add(Route::kFlat, {nccl, chosen ? "" : shared});
  add(Route::kHierarchical, {shape_forbids(Route::kHierarchical), nccl, staged, chosen ? "" : shared});
  add(Route::kStaged, {staged});
}

Status Communicator::refuse(Route wanted, const std::string& why) const {
  return {Code::kUnavailable, std::string("route ") + route_name(wanted) + " (BAGUA_DEVICE_ROUTE) can't be had for " +
                                  (members_.everyone ? "all ranks" : "communicator " + std::to_string(members_.comm)) +
                                  ": " + why + ". Mend that, or choose another route or none: then it is measured"};
}

Status Communicator::choose(const std::vector<Facts>& all, std::vector<Route>* candidates) {
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i].version != all[0].version) return {Code::kInvalid, "ranks have different versions of the GPU leg"};
    if (all[i].forced != all[0].forced) {
      return {Code::kInvalid, "ranks " + std::to_string(members_.ranks[0]) + " and " +
                                  std::to_string(members_.ranks[i]) +
                                  " have different BAGUA_DEVICE_ROUTE: all ranks must have the same"};
    }
  }
  look_at(all);
  const auto& impossible = excluded_.impossible;
  const Route wanted = static_cast<Route>(all[0].forced - 1);
  if (all[0].forced != 0 && (members_.everyone || shape_forbids(wanted).empty())) {
    const auto found = impossible.find(wanted);
    if (found != impossible.end()) return refuse(wanted, found->second);
    *candidates = {wanted};
    return Status::ok();
  }
  for (const Route route : {Route::kFlat, Route::kHierarchical, Route::kStaged}) {
    if (impossible.count(route) != 0 || (route == Route::kFlat && members_.size() == 1)) continue;
    candidates->push_back(route);
  }
  return Status::ok();
}

Status Communicator::open(uint8_t forced) {
  HostCollectives daemon(runtime_, members_.comm);
  std::vector<Facts> all;
  std::vector<Route> candidates;
  if (Status status = gather_facts(&daemon, forced, &all); !status) return status;
  if (Status status = choose(all, &candidates); !status) return status;
  const bool alone = forced != 0 && candidates == std::vector<Route>{static_cast<Route>(forced - 1)};
  for (const Route route : {Route::kFlat, Route::kHierarchical}) {
    if (!contains(candidates, route)) continue;
    if (Status status = set_up(&daemon, route); !status) return status;
    const auto found = excluded_.failed.find(route);
    if (found == excluded_.failed.end()) continue;
    if (alone) return refuse(route, found->second);
    candidates.erase(std::find(candidates.begin(), candidates.end(), route));
  }
  if (candidates.empty()) {
    std::string why;
    for (const auto* reasons : {&excluded_.impossible, &excluded_.failed}) {
      for (const auto& [route, reason] : *reasons) why += std::string("; ") + route_name(route) + ": " + reason;
    }
    return {Code::kUnavailable, "no way for tensors of GPUs" + why};
  }
  route_ = candidates.front();
  // Inside a host NCCL is always the fastest, and a forced route is not measured.
  if (candidates.size() == 1 || members_.on_one_host()) return Status::ok();
  const Status status = measure(&daemon, candidates);
  if (status) drop_slower();
  return status;
}

// Sets up a route at all members or at none. In both cases it returns ok, and excluded_.failed has the reason if none
// has the route. An error means that the job has failed.
Status Communicator::set_up(HostCollectives* daemon, Route route) {
  const bool flat = route == Route::kFlat;
  Handles made, children;
  std::string why;
  Status status = connect(daemon, flat, &made, &why);
  if (status && why.empty() && divides_) {
    std::string undivided;
    status = divide(daemon, made, &children, &undivided);
    if (status && !undivided.empty()) {  // at all members
      divides_ = false;
      excluded_.undivided = undivided;
      abort_together(runtime_, made);
      status = connect(daemon, flat, &made, &why);
    }
  }
  const Handles& used = children.empty() ? made : children;
  if (status && why.empty()) status = agree(daemon, flat ? finish_flat(used) : finish_hierarchical(used), &why);
  made.insert(made.end(), children.begin(), children.end());
  if (!status || !why.empty()) {
    if (flat) flat_.reset();
    if (!flat) hierarchical_.reset();
    abort_together(runtime_, made);
    excluded_.failed[route] = why;
    return status;
  }
  handles_[route] = made;
  for (const auto& handle : made) watcher_->add(handle);
  return Status::ok();
}

// Makes NCCL's communicators of a route.
Status Communicator::connect(HostCollectives* daemon, bool flat, Handles* made, std::string* why) {
  const std::vector<int> near = members_.neighbours();
  const int leader = flat ? 0 : near.front(), ranks = flat ? members_.size() : static_cast<int>(near.size());
  const auto place = std::find(near.begin(), near.end(), members_.index) - near.begin();
  made->clear();
  for (size_t i = 0; i < (flat ? 1 : 2); ++i) {
    made->push_back(std::make_shared<NcclHandle>(runtime_, ranks, flat ? members_.index : static_cast<int>(place)));
  }
  std::vector<NcclId> ids;
  Status status = make_ids(daemon, members_.index == leader, leader, made->size(), &ids, why);
  if (!status || !why->empty()) return status;
  for (size_t i = 0; i < made->size() && status; ++i) status = (*made)[i]->create(ids[i]);
  return await(daemon, *made, status, why);
}

// Makes children that block.
Status Communicator::divide(HostCollectives* daemon, const Handles& handles, Handles* children, std::string* why) {
  Status mine;
  for (size_t i = 0; i < handles.size() && mine; ++i) mine = handles[i]->divide();
  const Status status = await(daemon, handles, mine, why);
  if (!status || !why->empty()) return status;
  for (const auto& handle : handles) children->push_back(handle->take_child());
  return Status::ok();
}

// Exchanges the outcome of a step. `why` stays empty if all members succeeded. Otherwise it has the members' errors, by
// name: the failure of one member may cause different errors at others.
Status Communicator::agree(HostCollectives* daemon, const Status& mine, std::string* why) {
  if (runtime_->failure.failed()) return runtime_->failure.status();
  double trouble = mine ? 0 : 1;
  if (Status status = daemon->all_max(&trouble, 1); !status || trouble == 0) return status;
  char words[kWords] = {};
  if (!mine) put(words, mine.message());
  std::vector<char> all(kWords * members_.ranks.size());
  if (Status status = daemon->all_gather(words, all.data(), kWords, members_.size()); !status) return status;
  int told = 0;
  for (size_t i = 0; i < members_.ranks.size() && told < kTold; ++i) {
    const char* const said = all.data() + i * kWords;
    if (*said == '\0') continue;
    *why += (told++ == 0 ? "rank " : "; rank ") + std::to_string(members_.ranks[i]) + ": ";
    why->append(said, strnlen(said, kWords));
  }
  return Status::ok();
}

Status Communicator::make_ids(HostCollectives* daemon, bool maker, int leader, size_t count, std::vector<NcclId>* ids,
                              std::string* why) {
  std::vector<NcclId> mine(count), all(count * members_.ranks.size());
  Status made;
  for (size_t i = 0; maker && made && i < count; ++i) {
    made = runtime_->nccl(runtime_->libraries.nccl.unique_id(&mine[i]), "making an id");
  }
  if (Status status = agree(daemon, made, why); !status || !why->empty()) return status;
  const uint64_t bytes = count * sizeof(NcclId);
  if (Status status = daemon->all_gather(mine.data(), all.data(), bytes, members_.size()); !status) return status;
  const auto first = all.begin() + static_cast<std::ptrdiff_t>(static_cast<size_t>(leader) * count);
  ids->assign(first, first + static_cast<std::ptrdiff_t>(count));
  return Status::ok();
}

// Waits until all members have done what they began (`mine`: how this one began it). NCCL would wait for ever for a
// failed member, so members exchange their state regularly.
Status Communicator::await(HostCollectives* daemon, const Handles& handles, Status mine, std::string* why) {
  for (int pause_ms = 1;; pause_ms = std::min(2 * pause_ms, kLongestPauseMs)) {
    bool busy = mine.is_ok();
    for (int waited_ms = 0; busy && waited_ms < pause_ms; ++waited_ms) {
      poll(nullptr, 0, 1);  // NCCL's state can only be polled
      busy = false;
      for (size_t i = 0; i < handles.size() && mine; ++i) {
        bool over = true;
        mine = handles[i]->ready(&over);
        busy = busy || !over;
      }
      busy = busy && mine.is_ok();
    }
    double states[] = {mine ? 0.0 : 1.0, busy ? 1.0 : 0.0};
    if (Status status = daemon->all_max(states, 2); !status) return status;
    if (states[0] != 0) return agree(daemon, mine, why);
    if (states[1] == 0) return Status::ok();
  }
}

Status Communicator::finish_flat(const Handles& handles) {
  flat_ = std::make_unique<FlatRoute>(runtime_, handles.front(), !members_.on_one_host(), kernels_);
  return flat_->open();
}

Status Communicator::finish_hierarchical(const Handles& handles) {
  if (Status status = make_across(); !status) return status;
  Operation collective;
  StagedRoute* staged = nullptr;
  {
    const Lock lock(mutex_);
    if (Status status = staged_for(collective, &staged); !status) return status;
  }
  hierarchical_ = std::make_unique<HierarchicalRoute>(runtime_, table_, staged, handles[0], handles[1], across_);
  return hierarchical_->open();
}

Status Communicator::make_across() {
  std::map<int, int> seen;  // members of each host so far
  std::vector<int32_t> ranks;
  std::vector<int> place;
  for (int i = 0; i < members_.size(); ++i) place.push_back(seen[members_.host[static_cast<size_t>(i)]]++);
  const int mine = place[static_cast<size_t>(members_.index)];
  for (size_t i = 0; i < place.size(); ++i) {
    if (place[i] == mine) ranks.push_back(members_.ranks[i]);
  }
  const uint32_t number = kAcross + members_.comm * kMostLocal + static_cast<uint32_t>(mine);
  const HostApi& host = runtime_->host;
  HostError error;
  const int code = host.create_comm(host.client, number, ranks.data(), ranks.size(), 60 * kNsPerS, &error);
  if (code == kHostOk) across_ = number;
  return runtime_->host_status(code, error);
}

// Measures the candidates. All members learn the time of the slowest member, so they choose the same route.
Status Communicator::measure(HostCollectives* daemon, const std::vector<Route>& candidates) {
  std::vector<double> seconds;
  std::atomic<uint64_t> uncounted{0};
  const uint64_t room = *std::max_element(std::begin(kMeasured), std::end(kMeasured));
  void* data = nullptr;
  Status timed = runtime_->allocate(room, &data, &uncounted);
  for (size_t i = 0; i < candidates.size() && timed; ++i) {
    double total = 0;
    for (const uint64_t bytes : kMeasured) {
      double one = 0;
      if (timed) timed = time_route(candidates[i], data, bytes, &one);
      total += one / static_cast<double>(bytes);  // all sizes have the same weight
    }
    seconds.push_back(total);
  }
  if (data != nullptr) runtime_->keep(data, room);
  if (!timed) return timed;
  if (Status status = daemon->all_max(seconds.data(), seconds.size()); !status) return status;
  const auto best = std::min_element(seconds.begin(), seconds.end());
  route_ = candidates[static_cast<size_t>(best - seconds.begin())];
  return Status::ok();
}

// Destroys NCCL's communicators of slower routes, because each holds device memory. No operation is pending on them.
void Communicator::drop_slower() {
  for (auto it = handles_.begin(); it != handles_.end();) {
    if (it->first == route_) {
      ++it;
      continue;
    }
    if (it->first == Route::kFlat) flat_.reset();
    if (it->first == Route::kHierarchical) hierarchical_.reset();
    for (const auto& handle : it->second) watcher_->remove(handle);
    destroy_together(runtime_, it->second);
    it = handles_.erase(it);
  }
}

Status Communicator::time_route(Route route, void* data, uint64_t bytes, double* seconds) {
  const CudaRuntime& cuda = runtime_->libraries.cuda;
  CudaStream stream = nullptr;
  if (Status status = runtime_->make_stream(Traffic::kCollective, &stream); !status) return status;
  Status status = runtime_->cuda(cuda.set(data, 0, bytes, stream), "clearing memory");
  int64_t begin = 0;
  for (int round = 0; round < kRounds && status; ++round) {
    if (round == 1) begin = now_ns();
    Operation* operation = nullptr;
    CudaEvent start = nullptr;
    status = table_->take(&operation);
    if (!status) break;
    operation->descriptor.kind = static_cast<uint8_t>(Kind::kAllReduce);
    operation->descriptor.comm = members_.comm;
    operation->descriptor.count = bytes / sizeof(float);
    operation->src = operation->dst = static_cast<char*>(data);
    operation->src_bytes = operation->dst_bytes = bytes;
    operation->awaited_ns = now_ns();
    status = runtime_->take_event(&start);
    if (status) status = runtime_->cuda(cuda.event_record(start, stream), "recording an event");
    const CudaEvent end = operation->end;
    const uint64_t ticket = operation->ticket;
    if (status) {
      const Lock lock(mutex_);
      status = submit_on(route, operation, start);
    }
    runtime_->put_event(start);
    CudaError code = kCudaNotReady;
    while (status && (code = cuda.event_query(end)) == kCudaNotReady) {
      sched_yield();  // other ranks of this machine measure at the same time
      status = runtime_->failure.status();
    }
    if (status) status = runtime_->cuda(code, "a measured all-reduce");
    table_->release(ticket);
  }
  *seconds = static_cast<double>(now_ns() - begin) / static_cast<double>(kNsPerS) / (kRounds - 1);
  cuda.stream_destroy(stream);
  return status;
}

}  // namespace bagua::device
