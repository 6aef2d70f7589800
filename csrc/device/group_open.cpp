// How the members of a communicator choose a route and make what it needs.
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "base/clock.h"
#include "device/group.h"

namespace bagua::device {

namespace {

constexpr uint32_t kAcross = 0x80000000u;  // communicators from here on belong to the leg
constexpr uint32_t kMostLocal = 256;
constexpr uint64_t kMeasured[] = {256 << 10, 8 << 20};  // bytes of an all-reduce
constexpr int kRounds = 3;                              // the first one is not counted

bool contains(const std::vector<Route>& routes, Route route) {
  return std::find(routes.begin(), routes.end(), route) != routes.end();
}

}  // namespace

Status Group::gather_facts(Daemon* daemon, uint8_t forced, std::vector<Facts>* all) {
  const Libraries& libraries = runtime_->libraries;
  Facts mine;
  mine.nccl_version = libraries.has_nccl() ? libraries.nccl_version : 0;
  mine.kernels = libraries.has_kernels();
  mine.staged = libraries.has_wait_value();
  mine.named_host = getenv("NCCL_HOSTID") != nullptr;
  mine.forced = forced;
  Status status = runtime_->cuda(libraries.cuda.pci_bus_id(mine.bus, sizeof(mine.bus) - 1, runtime_->device),
                                 "asking for the PCI bus id");
  if (!status) return status;
  all->resize(members_.ranks.size());
  return daemon->all_gather(&mine, all->data(), sizeof(Facts), members_.size());
}

// The same at all members: made from what all of them said.
Status Group::choose(const std::vector<Facts>& all, std::vector<Route>* candidates) {
  bool nccl = true, staged = true, shared = false;
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i].version != all[0].version) return {Code::kInvalid, "ranks have different versions of the GPU leg"};
    if (all[i].forced != all[0].forced) {
      return {Code::kInvalid, "ranks " + std::to_string(members_.ranks[0]) + " and " +
                                  std::to_string(members_.ranks[i]) +
                                  " have different BAGUA_DEVICE_ROUTE: all ranks must have the same"};
    }
    nccl = nccl && all[i].nccl_version == all[0].nccl_version && all[i].nccl_version != 0;
    staged = staged && all[i].staged != 0;
    kernels_ = kernels_ && all[i].kernels != 0;
    for (size_t k = 0; k < i; ++k) {
      const bool same =
          members_.host[i] == members_.host[k] && strncmp(all[i].bus, all[k].bus, sizeof(all[i].bus)) == 0;
      shared = shared || (same && !(all[i].named_host != 0 && all[k].named_host != 0));
    }
  }
  const uint32_t local = static_cast<uint32_t>(members_.neighbours().size());
  const bool layered =
      nccl && staged && members_.regular() && members_.comm < kAcross / kMostLocal && local < kMostLocal;
  if (members_.size() > 1 && nccl && !shared) candidates->push_back(Route::kFlat);
  if (layered && !shared) candidates->push_back(Route::kHierarchical);
  if (staged) candidates->push_back(Route::kStaged);
  const uint8_t forced = all[0].forced;
  if (forced != 0) {
    const Route wanted = static_cast<Route>(forced - 1);
    // NCCL itself then says whether it takes several ranks on one GPU.
    const bool possible = wanted == Route::kStaged ? staged : wanted == Route::kFlat ? nccl : layered;
    if (possible) {
      *candidates = {wanted};
      if (staged && wanted != Route::kStaged) candidates->push_back(Route::kStaged);
    }
  }
  if (!candidates->empty()) return Status::ok();
  const auto why = [this](const char* name) {
    const auto found = runtime_->libraries.why_not.find(name);
    return found == runtime_->libraries.why_not.end() ? std::string("missing on another rank") : found->second;
  };
  return {Code::kUnavailable, "no way for tensors of GPUs: without NCCL (" + why("nccl") +
                                  ") and without waits on memory (" + why("driver") + ")"};
}

Status Group::open(uint8_t forced) {
  Daemon daemon(runtime_, members_.comm);
  std::vector<Facts> all;
  std::vector<Route> candidates;
  if (Status status = gather_facts(&daemon, forced, &all); !status) return status;
  if (Status status = choose(all, &candidates); !status) return status;
  if (contains(candidates, Route::kFlat) || contains(candidates, Route::kHierarchical)) {
    if (Status status = make_handles(&daemon, candidates); !status) return status;
  }
  candidates.erase(std::remove_if(candidates.begin(), candidates.end(),
                                  [this](Route route) {
                                    return (route == Route::kFlat && flat_ == nullptr) ||
                                           (route == Route::kHierarchical && hierarchical_ == nullptr);
                                  }),
                   candidates.end());
  if (candidates.empty()) return {Code::kUnavailable, "NCCL could not be set up (NCCL_DEBUG=INFO has more)"};
  route_ = candidates.front();
  // Inside a host nothing is faster than NCCL; and what was asked for is not questioned.
  if (forced != 0 || candidates.size() == 1 || members_.on_one_host()) return Status::ok();
  return measure(&daemon, candidates);
}

Status Group::make_handles(Daemon* daemon, const std::vector<Route>& candidates) {
  const bool flat = contains(candidates, Route::kFlat), layered = contains(candidates, Route::kHierarchical);
  const std::vector<int> near = members_.neighbours();
  struct Ids {
    NcclId flat, down, up;
    uint8_t ok;
  } mine{};
  mine.ok = 1;
  const auto make = [&](bool wanted, NcclId* id) {
    if (wanted && runtime_->libraries.nccl.unique_id(id) != kNcclOk) mine.ok = 0;
  };
  make(flat && members_.index == 0, &mine.flat);
  make(layered && members_.index == near.front(), &mine.down);
  make(layered && members_.index == near.front(), &mine.up);
  std::vector<Ids> all(members_.ranks.size());
  if (Status status = daemon->all_gather(&mine, all.data(), sizeof(Ids), members_.size()); !status) return status;
  const bool complete = std::all_of(all.begin(), all.end(), [](const Ids& ids) { return ids.ok != 0; });
  const Ids& leader = all[static_cast<size_t>(near.front())];
  Status made = complete ? make_nccl(flat, layered, {all[0].flat, leader.down, leader.up})
                         : Status(Code::kUnavailable, "NCCL gave no id");
  if (runtime_->failure.failed()) return runtime_->failure.status();
  double trouble = made ? 0 : 1;  // one member without NCCL: nobody uses it
  if (Status status = daemon->all_max(&trouble, 1); !status) return status;
  if (trouble == 0) return Status::ok();
  hierarchical_.reset();
  flat_.reset();
  for (const auto& handle : handles_) {
    watcher_->remove(handle);
    handle->abort();
  }
  handles_.clear();
  return Status::ok();
}

Status Group::make_nccl(bool flat, bool hierarchical, const std::vector<NcclId>& ids) {
  const std::vector<int> near = members_.neighbours();
  const int local = static_cast<int>(std::find(near.begin(), near.end(), members_.index) - near.begin());
  const auto make = [this](int ranks, int rank, const NcclId& id, std::shared_ptr<NcclHandle>* out) {
    *out = std::make_shared<NcclHandle>(runtime_, ranks, rank);
    if (Status status = (*out)->create(id); !status) return status;
    handles_.push_back(*out);
    watcher_->add(*out);
    return Status::ok();
  };
  if (flat) {
    std::shared_ptr<NcclHandle> handle;
    if (Status status = make(members_.size(), members_.index, ids[0], &handle); !status) return status;
    flat_ = std::make_unique<Flat>(runtime_, handle, !members_.on_one_host(), kernels_);
    if (Status status = flat_->open(); !status) return status;
  }
  if (!hierarchical) return Status::ok();
  std::shared_ptr<NcclHandle> down, up;
  const int ranks = static_cast<int>(near.size());
  if (Status status = make(ranks, local, ids[1], &down); !status) return status;
  if (Status status = make(ranks, local, ids[2], &up); !status) return status;
  if (Status status = make_across(); !status) return status;
  Operation collective;
  Lane* lane = nullptr;
  if (Status status = lane_for(collective, &lane); !status) return status;
  hierarchical_ = std::make_unique<Hierarchical>(runtime_, table_, lane, down, up, across_);
  return hierarchical_->open();
}

Status Group::make_across() {
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

// The slowest member counts, and all members know it: so all choose the same.
Status Group::measure(Daemon* daemon, const std::vector<Route>& candidates) {
  std::vector<double> seconds;
  for (const Route route : candidates) {
    double total = 0;
    for (const uint64_t bytes : kMeasured) {
      double one = 0;
      if (Status status = time_route(route, bytes, &one); !status) return status;
      total += one / static_cast<double>(bytes);  // sizes weigh alike
    }
    seconds.push_back(total);
  }
  if (Status status = daemon->all_max(seconds.data(), seconds.size()); !status) return status;
  const auto best = std::min_element(seconds.begin(), seconds.end());
  route_ = candidates[static_cast<size_t>(best - seconds.begin())];
  return Status::ok();
}

Status Group::time_route(Route route, uint64_t bytes, double* seconds) {
  const CudaRuntime& cuda = runtime_->libraries.cuda;
  void* data = nullptr;
  CudaStream stream = nullptr;
  std::atomic<uint64_t> uncounted{0};
  if (Status status = runtime_->make_stream(&stream); !status) return status;
  Status status = runtime_->allocate(bytes, &data, &uncounted);
  if (status) status = runtime_->cuda(cuda.set(data, 0, bytes, stream), "clearing memory");
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
    status = runtime_->take_event(&start);
    if (status) status = runtime_->cuda(cuda.event_record(start, stream), "recording an event");
    const CudaEvent end = operation->end;
    const uint64_t ticket = operation->ticket;
    if (status) {
      std::lock_guard<std::mutex> lock(mutex_);
      status = submit_on(route, operation, start);
    }
    runtime_->put_event(start);
    while (status && cuda.event_query(end) == kCudaNotReady) status = runtime_->failure.status();
    table_->release(ticket);
  }
  *seconds = static_cast<double>(now_ns() - begin) / static_cast<double>(kNsPerS) / (kRounds - 1);
  cuda.stream_destroy(stream);
  if (data != nullptr && status) cuda.release(data);  // else the device may still use it: the job ends
  return status;
}

}  // namespace bagua::device
