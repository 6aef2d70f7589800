#include "engine/state.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "channel/futex.h"
#include "channel/protocol.h"
#include "transport/mesh.h"

namespace bagua {

namespace {
constexpr size_t kMaxEvents = 10'000;  // a daemon that never reads them must not cost memory without end
}

Status check_options(const EngineOptions& options) {
  const auto invalid = [](const std::string& what) { return Status(Code::kInvalid, "Engine: " + what); };
  const int hosts = static_cast<int>(options.hosts.size());
  if (hosts == 0) return invalid("hosts is empty");
  if (options.host_index < 0 || options.host_index >= hosts) {
    return invalid("host_index " + std::to_string(options.host_index) + " is not one of " + std::to_string(hosts));
  }
  std::set<int> ranks;
  for (const auto& there : options.hosts) {
    if (there.empty()) return invalid("every host needs at least one rank");
    for (const int rank : there) {
      if (rank < 0 || !ranks.insert(rank).second) return invalid("rank " + std::to_string(rank) + " is there twice");
    }
  }
  if (ranks.size() > kMaxMembers || *ranks.rbegin() != static_cast<int>(ranks.size()) - 1) {
    return invalid("the ranks of all hosts must be 0 to n - 1, and at most " + std::to_string(kMaxMembers));
  }
  for (const int rank : options.local_ranks()) {
    const bool has = std::any_of(options.tokens.begin(), options.tokens.end(), [rank](const auto& token) {
      return token.first == rank && token.second.size() == kTokenBytes;
    });
    if (!has) return invalid("rank " + std::to_string(rank) + " needs a token of 32 bytes");
  }
  if (options.streams < 1 || options.streams > Mesh::kMaxStreams) return invalid("streams must be 1 to 64");
  if (options.chunk_bytes < 64 || options.chunk_bytes > Mesh::kMaxMessage) {
    return invalid("chunk_bytes must be 64 to " + std::to_string(Mesh::kMaxMessage));
  }
  return Status::ok();
}

void BusyClock::start(int64_t now) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (running_++ == 0) since_ = std::max(now, since_);
}

void BusyClock::stop(int64_t now, std::atomic<uint64_t>* total) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (--running_ > 0 || now <= since_) return;
  total->fetch_add(static_cast<uint64_t>(now - since_), std::memory_order_relaxed);
  since_ = now;
}

Status EngineState::open() {
  if (Status status = check_options(options_); !status) return status;
  if (Status status = events_ready_.open(); !status) return status;
  if (Status status = Mapping::create(sizeof(JobPage), &page_fd_, &page_memory_); !status) return status;
  JobPage* page = new (page_memory_->data()) JobPage();
  page->version = kLayoutVersion;
  page->host_index = static_cast<uint32_t>(options_.host_index);
  page->generation = options_.generation;
  size_t world = 0;
  for (const auto& there : options_.hosts) world += there.size();
  page->world_size = static_cast<uint32_t>(world);
  page->local_ranks = static_cast<uint32_t>(options_.local_ranks().size());
  for (size_t i = 0; i < options_.local_ranks().size() && i < kArrivalRanks; ++i) {
    page->ranks[i] = static_cast<uint32_t>(options_.local_ranks()[i]);
  }
  return Status::ok();
}

bool EngineState::set_error(const std::string& reason, bool ended) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (failed_.load(std::memory_order_relaxed)) return false;
  error_ = reason;
  JobPage* job = page();
  job->error_state.store(kErrorWriting, std::memory_order_relaxed);
  const size_t length = std::min(reason.size(), kErrorBytes);
  memcpy(job->error, reason.data(), length);
  job->error_length = static_cast<uint32_t>(length);
  job->error_state.store(kErrorSet, std::memory_order_release);
  futex_wake(&job->error_state);  // GPU legs sleep on it
  ended_.store(ended, std::memory_order_relaxed);
  failed_.store(true, std::memory_order_release);
  return true;
}

bool EngineState::fail(const std::string& reason) {
  if (!set_error(reason, false)) return false;
  tell("error", -1, reason);
  ring_doorbell();
  return true;
}

void EngineState::end(const std::string& reason) {
  if (set_error(reason, true)) ring_doorbell();
}

std::string EngineState::error() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return error_;
}

void EngineState::tell(const char* kind, int rank, const std::string& text) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (events_.size() >= kMaxEvents) return;
    events_.push_back({kind, rank, text});
  }
  events_ready_.signal();
}

std::vector<Event> EngineState::take_events() {
  std::lock_guard<std::mutex> lock(mutex_);
  events_ready_.drain();
  std::vector<Event> taken;
  taken.swap(events_);
  return taken;
}

void EngineState::set_ring(std::vector<int> order) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (ring_.empty()) ring_ = std::move(order);
}

std::vector<int> EngineState::ring() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return ring_;
}

void EngineState::await_no_more(int rank) {
  const auto& locals = options_.local_ranks();
  const auto at = static_cast<size_t>(std::find(locals.begin(), locals.end(), rank) - locals.begin());
  if (at >= std::min<size_t>(locals.size(), kArrivalRanks)) return;
  for (Arrivals& arrivals : page()->arrivals) arrivals.submitted[at].store(UINT64_MAX);
}

void EngineState::ring_doorbell() {
  JobPage* job = page();
  job->doorbell.fetch_add(1);
  if (job->sleeping.exchange(0) != 0) futex_wake(&job->doorbell);
}

}  // namespace bagua
