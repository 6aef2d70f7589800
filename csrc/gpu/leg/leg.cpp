#include "gpu/leg/leg.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "base/clock.h"

namespace bagua::device {

namespace {

constexpr int64_t kCommTimeoutNs = 60 * kNsPerS;

// Sets 1 + Route, or 0 for "". kInvalid: the name is unknown.
Status parse_route(const std::string& name, uint8_t* out) {
  *out = 0;
  if (name.empty()) return Status::ok();
  for (int route = 0; route < kRoutes; ++route) {
    if (name == route_name(static_cast<Route>(route))) *out = static_cast<uint8_t>(route + 1);
  }
  if (*out != 0) return Status::ok();
  return {Code::kInvalid, "route (BAGUA_DEVICE_ROUTE) is \"" + name +
                              "\"; it must be staged, flat, hierarchical, or empty: then it is measured"};
}

bool wants_blocking(bool by_itself) {
  const char* const set = getenv("BAGUA_NCCL_BLOCKING");
  return set == nullptr || *set == '\0' ? by_itself : strcmp(set, "0") != 0;
}

}  // namespace

Leg::Leg(const HostApi& host, LegOptions options)
    : pid_(getpid()),
      options_(std::move(options)),
      runtime_(std::make_unique<Runtime>(host, options_.device, options_.kernels)) {
  runtime_->nccl_blocks = wants_blocking(options_.blocking);
}

Status Leg::create(const HostApi& host, LegOptions options, std::unique_ptr<Leg>* out) {
  if (options.route.empty()) {
    if (const char* const chosen = getenv("BAGUA_DEVICE_ROUTE"); chosen != nullptr) options.route = chosen;
  }
  uint8_t forced = 0;
  if (Status status = parse_route(options.route, &forced); !status) return status;
  std::vector<int> world;
  for (const auto& there : options.hosts) world.insert(world.end(), there.begin(), there.end());
  if (std::find(world.begin(), world.end(), options.me) == world.end()) {
    return {Code::kInvalid, "rank " + std::to_string(options.me) + " is on none of the hosts"};
  }
  std::sort(world.begin(), world.end());
  std::unique_ptr<Leg> leg(new Leg(host, std::move(options)));
  leg->forced_ = forced;
  if (Status status = leg->runtime_->open(); !status) return status;
  leg->table_ = std::make_unique<OperationTable>(leg->runtime_.get());
  leg->watcher_ = std::make_unique<Watcher>(leg->runtime_.get());
  leg->watcher_->start();
  if (leg->options_.world) {
    if (Status status = leg->open_group(0, std::move(world)); !status) return status;
  }
  *out = std::move(leg);
  return Status::ok();
}

bool Leg::forked() const {
  return getpid() != pid_;
}

Status Leg::usable() const {
  if (!forked()) return runtime_->failure.status();
  return {Code::kInvalid, "this GPU leg belongs to process " + std::to_string(pid_) +
                              ": collective operations can't be called in a forked child"};
}

Leg::~Leg() {
  close();
  if (!leaked_ && !forked()) return;
  // The device does not answer and may still use memory of these groups: they stay until the process ends.
  for (auto& [comm, group] : groups_) static_cast<void>(group.release());
  static_cast<void>(watcher_.release());
  static_cast<void>(table_.release());
  static_cast<void>(runtime_.release());
}

Status Leg::open_group(uint32_t comm, std::vector<int> ranks) {
  Members members;
  size_t world = 0;
  members.comm = comm;
  std::sort(ranks.begin(), ranks.end());
  for (const int rank : ranks) {
    int host = 0;
    for (const auto& there : options_.hosts) {
      if (std::find(there.begin(), there.end(), rank) != there.end()) members.host.push_back(host);
      ++host;
    }
  }
  const auto me = std::find(ranks.begin(), ranks.end(), options_.me);
  if (me == ranks.end() || members.host.size() != ranks.size()) {
    return {Code::kInvalid, "communicator " + std::to_string(comm) + " has unknown ranks, or lacks rank " +
                                std::to_string(options_.me) + ", which makes it"};
  }
  members.index = static_cast<int>(me - ranks.begin());
  members.ranks = std::move(ranks);
  for (const auto& there : options_.hosts) world += there.size();
  members.everyone = members.ranks.size() == world;
  OnDevice here(*runtime_);
  if (!here.status()) return here.status();
  auto group = std::make_unique<Communicator>(runtime_.get(), table_.get(), watcher_.get(), std::move(members));
  const Status status = group->open(forced_);
  if (!status) {
    if (!group->close()) leak(std::move(group));
    return status;
  }
  WriterLock lock(mutex_);
  groups_[comm] = std::move(group);
  return Status::ok();
}

Status Leg::create_comm(uint32_t comm, std::vector<int> ranks) {
  if (Status status = usable(); !status) return status;
  {
    const ReaderLock lock(mutex_);
    if (closed_) return {Code::kInvalid, "the GPU leg is closed"};
    if (groups_.count(comm) != 0) return {Code::kInvalid, "communicator " + std::to_string(comm) + " exists"};
  }
  const HostApi& host = runtime_->host;
  const std::vector<int32_t> members(ranks.begin(), ranks.end());
  HostError error;
  const int code = host.create_comm(host.client, comm, members.data(), members.size(), kCommTimeoutNs, &error);
  if (code != kHostOk) return runtime_->host_status(code, error);
  return open_group(comm, std::move(ranks));
}

Status Leg::destroy_comm(uint32_t comm) {
  if (forked()) return usable();
  std::unique_ptr<Communicator> group;
  {
    WriterLock lock(mutex_);
    const auto found = groups_.find(comm);
    if (comm == 0 || found == groups_.end()) {
      return {Code::kInvalid, "communicator " + std::to_string(comm) + " can't be destroyed: it does not exist"};
    }
    group = std::move(found->second);
    groups_.erase(found);
  }
  OnDevice here(*runtime_);
  if (!group->close()) leak(std::move(group));
  if (Status status = runtime_->failure.status(); !status) return status;
  HostError error;
  return runtime_->host_status(runtime_->host.destroy_comm(runtime_->host.client, comm, &error), error);
}

Status Leg::route(uint32_t comm, Route* out, Excluded* excluded) {
  const ReaderLock lock(mutex_);
  const auto found = groups_.find(comm);
  if (found == groups_.end()) return {Code::kInvalid, "communicator " + std::to_string(comm) + " does not exist"};
  *out = found->second->route();
  *excluded = found->second->excluded();
  return Status::ok();
}

Status Leg::check_stream(CudaStream stream) {
  int capturing = kCaptureNone;
  Status status = runtime_->cuda(runtime_->libraries.cuda.stream_capturing(stream, &capturing), "looking at a stream");
  if (!status || capturing == kCaptureNone) return status;
  return {Code::kInvalid,
          "this stream is being captured into a CUDA graph: operations that other ranks and the node daemon take part "
          "in can't be part of one. Capture forward and backward by themselves, and communicate outside"};
}

Status Leg::submit(const Descriptor& descriptor, const void* src, void* dst, CudaStream stream, uint64_t* ticket) {
  if (Status status = usable(); !status) return status;
  const ReaderLock lock(mutex_);
  if (closed_) return {Code::kInvalid, "the GPU leg is closed"};
  const auto found = groups_.find(descriptor.comm);
  if (found == groups_.end()) {
    return {Code::kInvalid, "communicator " + std::to_string(descriptor.comm) + " does not exist"};
  }
  OnDevice here(*runtime_);
  if (!here.status()) return here.status();
  if (Status status = check_stream(stream); !status) return status;
  Operation* operation = nullptr;
  if (Status status = table_->take(&operation); !status) return status;
  operation->descriptor = descriptor;
  operation->src = static_cast<const char*>(src);
  operation->dst = static_cast<char*>(dst);
  operation->submitted_ns = now_ns();
  *ticket = operation->ticket;
  const Members& members = found->second->members();
  Status refused = check_operation(operation, members.index, members.size());
  if (refused) refused = found->second->check(*operation);
  if (!refused) {
    table_->release(*ticket);
    table_->retire(operation);
    return refused;
  }
  const Status status = found->second->submit(operation, stream);
  if (!status) table_->release(*ticket);
  return status;
}

Status Leg::find(uint64_t ticket, Operation** out) {
  *out = table_->find(ticket);
  if (*out != nullptr) return Status::ok();
  return {Code::kInvalid, "ticket " + std::to_string(ticket) + " is unknown, or was released"};
}

Status Leg::look(Operation* operation, bool* over) {
  const CudaError code = runtime_->libraries.cuda.event_query(operation->end);
  *over = code != kCudaNotReady;
  if (!*over) return Status::ok();
  operation->seen_done(now_ns());
  return runtime_->cuda(code, "an operation on the device");
}

Status Leg::done(uint64_t ticket, bool* done) {
  Operation* operation = nullptr;
  *done = true;
  if (runtime_->failure.failed()) return Status::ok();
  if (Status status = find(ticket, &operation); !status) return status;
  OnDevice here(*runtime_);
  return look(operation, done);
}

// Even after a failure the stream waits for the operation: released work may still write to memory that the caller will
// reuse.
Status Leg::wait(uint64_t ticket, CudaStream stream) {
  if (forked()) return usable();
  Operation* operation = nullptr;
  const Status found = find(ticket, &operation), failed = usable();
  if (!found) return failed ? found : failed;
  OnDevice here(*runtime_);  // stream 0 is the default stream of the current device
  if (!here.status()) return here.status();
  if (Status status = check_stream(stream); !status) return failed ? status : failed;
  int64_t nobody = 0;
  operation->awaited_ns.compare_exchange_strong(nobody, now_ns());
  const Status waits = runtime_->cuda(runtime_->libraries.cuda.stream_wait_event(stream, operation->end, 0), "waiting");
  return failed ? waits : failed;
}

void Leg::release(uint64_t ticket) {
  table_->release(ticket);
}

Status Leg::times(uint64_t ticket, Times* out) {
  *out = {};
  Operation* const operation = table_->find(ticket);
  if (operation == nullptr) return Status::ok();
  if (operation->done_ns.load() == 0) {
    OnDevice here(*runtime_);
    bool over = false;
    if (Status status = look(operation, &over); !status) return status;
  }
  *out = {operation->submitted_ns.load(), operation->started_ns.load(), operation->done_ns.load()};
  return Status::ok();
}

// Must not call CUDA, which may hang if other ranks never come.
Waiting Leg::waiting() {
  if (forked()) return {};
  return runtime_->wait_clock.longest();
}

Status Leg::transcode(const BaguaTranscode& work, CudaStream stream) {
  if (!runtime_->libraries.has_kernels()) {
    return {Code::kUnavailable, "there is no library of kernels: " + runtime_->libraries.why_not.at("kernels")};
  }
  OnDevice here(*runtime_);
  return runtime_->cuda(runtime_->libraries.kernels.transcode(&work, stream), "a codec's kernel");
}

std::string Leg::error() const {
  return runtime_->failure.failed() ? runtime_->failure.reason() : "";
}

bool Leg::close_groups(std::map<uint32_t, std::unique_ptr<Communicator>>* groups) {
  if (groups->empty()) return true;  // there may be no CUDA runtime
  OnDevice here(*runtime_);
  bool all = true;
  for (auto& [comm, group] : *groups) {
    if (group->close()) continue;
    all = false;
    leak(std::move(group));
  }
  groups->clear();
  return all;
}

// Leaks a group: CUDA may still use its memory, and the watcher objects that it refers to.
void Leg::leak(std::unique_ptr<Communicator> group) {
  static_cast<void>(group.release());
  runtime_->stuck.store(true);
}

bool Leg::quiet(const std::map<uint32_t, std::unique_ptr<Communicator>>& groups) const {
  if (groups.empty()) return true;
  if (runtime_->poller.hanging_since() != 0) return false;  // CUDA would hang in this thread, too
  OnDevice here(*runtime_);
  return std::all_of(groups.begin(), groups.end(), [](const auto& entry) { return entry.second->quiet(); });
}

void Leg::close() {
  if (forked()) return;
  std::map<uint32_t, std::unique_ptr<Communicator>> groups;
  {
    WriterLock lock(mutex_);
    if (closed_) return;
    closed_ = true;
    groups.swap(groups_);
  }
  // Closes in good order if nothing is pending; otherwise pending operations fail.
  if (quiet(groups)) leaked_ = !close_groups(&groups) || leaked_;
  runtime_->failure.fail("the GPU leg was closed");
  if (watcher_ != nullptr && !watcher_->stop()) {
    for (auto& [comm, group] : groups) leak(std::move(group));
    groups.clear();
  }
  leaked_ = !close_groups(&groups) || leaked_ || runtime_->stuck.load();
}

}  // namespace bagua::device
