// The rank's view of generations: enters them, and sees how they end. In an elastic job it outlives its daemon: it
// joins the one that is started in its place, with its memory.
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <thread>

#include "base/clock.h"
#include "channel/client.h"

namespace bagua {

namespace {

// Reads the page of a generation for a member; kUnavailable if it is not in it.
Status read_view(const GenerationPage& page, int member, GenerationView* view) {
  view->generation = page.generation;
  view->elastic = page.elastic != 0;
  view->newcomer = page.lobby != 0;
  const uint32_t world = page.world_size, hosts = page.hosts;
  if (world > kMaxMembers || hosts > world) return {Code::kCorrupt, "the daemon's page of the generation is damaged"};
  view->hosts.resize(hosts);
  for (uint32_t rank = 0; rank < world; ++rank) {
    const Place place = page.places[rank];
    if (place.host >= hosts) return {Code::kCorrupt, "the daemon's page of the generation is damaged"};
    view->hosts[place.host].push_back(static_cast<int>(rank));
    view->members.push_back(static_cast<int>(place.member));
    if (static_cast<int>(place.member) == member) view->rank = static_cast<int>(rank);
  }
  if (view->rank >= 0) return Status::ok();
  return {Code::kUnavailable, "generation " + std::to_string(page.generation) + " goes on without this process"};
}

std::string text_of(const Words& words) {
  return std::string(words.text, std::min<size_t>(words.length, kErrorBytes));
}

constexpr int64_t kComeBackNs = 60'000'000'000;  // without a daemon; its keeper would have ended this rank
constexpr int64_t kLookNs = 10'000'000;          // between two looks for the next daemon
constexpr int kSpins = 2000;                     // before a rank sleeps, where nobody else wants its core
constexpr int kYields = 100;                     // or where others may

// Nobody has answered, or not to the end: the next daemon may be starting, or have died as well.
Status not_there() {
  return {Code::kTimeout, "the node daemon is gone, and has not come back yet"};
}

}  // namespace

// The page is read once: whoever scribbles on it later changes nothing here.
Status ChannelClient::begin(int page) {
  std::shared_ptr<Mapping> memory;
  if (Status status = Mapping::open(page, kGenerationBytes, &memory, Pages::kOnDemand); !status) return status;
  const GenerationPage& sheet = *reinterpret_cast<const GenerationPage*>(memory->data());
  GenerationView view;
  if (Status status = read_view(sheet, member_, &view); !status) return status;
  const WriterLock nobody_meets(sheet_mutex_);
  const bool joins = sheet_memory_ == nullptr;
  if (!joins && view.generation <= generation()) return Status::ok();  // another thread was first
  std::vector<int> local;
  const uint32_t here = sheet.local_ranks;
  for (uint32_t i = 0; i < here && here <= kArrivalRanks; ++i) local.push_back(static_cast<int>(sheet.ranks[i]));
  const Lock lock(submit_mutex_);
  if (joins) {
    sheet_memory_ = std::move(memory);
    // A spinning waiter must not take a core from the one who works for it: every rank, and a helper for each.
    const uint32_t cores = std::max(1u, std::thread::hardware_concurrency());
    spins_ = cores > 2 * here ? kSpins : 0;
    if (cores >= here) {
      meeting_waits_.spins = kSpins;
    } else {
      meeting_waits_.yields = kYields;
    }
  } else if (Status status = sheet_memory_->replace(page, Pages::kOnDemand); !status) {
    return status;
  }
  local_ranks_ = std::move(local);
  groups_.clear();
  view_ = std::move(view);
  elastic_.store(view_.elastic, std::memory_order_relaxed);
  note_members(0, local_ranks_, may_meet(view_.hosts.size(), view_.members.size()) ? kWorldRoom : 0);
  generation_.store(view_.generation, std::memory_order_relaxed);
  return Status::ok();
}

Status ChannelClient::enter(int64_t deadline_ns, const Interrupt& interrupt) {
  const uint64_t before = generation();
  for (;;) {
    if (getpid() != pid_) return check_usable();
    const uint32_t seen = page()->changes.load();
    std::vector<Fd> descriptors;
    const Status status = ask(Request(Message::kEnter, generation()), nullptr, &descriptors);
    if (status.code() == Code::kDismissed) return status;
    if (!status) {
      const bool failed = sheet()->status.load(std::memory_order_acquire) == kGenerationFailed;
      if (!failed && status.code() == Code::kRegrouped && orphaned()) {
        if (Status joined = rejoin(deadline_ns, interrupt); !joined) return joined;
        if (generation() > before) return Status::ok();
        continue;
      }
      return {Code::kUnavailable, failed ? text_of(sheet()->error) : status.message()};
    }
    if (!descriptors.empty()) return begin(descriptors.front().get());
    if (Status waited = await_change(seen, deadline_ns, interrupt); !waited) return waited;
  }
}

Status ChannelClient::await_change(uint32_t seen, int64_t deadline_ns, const Interrupt& interrupt) {
  std::atomic<uint32_t>* const changes = &page()->changes;
  while (changes->load() == seen) {
    const int64_t now = now_ns();
    if (deadline_ns >= 0 && now >= deadline_ns) return {Code::kTimeout, "there is no next generation yet"};
    if (sleep_slice(changes, seen, now, deadline_ns)) continue;
    if (interrupt && interrupt()) return {Code::kAborted, "interrupted"};
    if (daemon_gone()) return Status::ok();  // the next question says so
  }
  return Status::ok();
}

GenerationView ChannelClient::view() {
  const Lock lock(submit_mutex_);
  return view_;
}

bool ChannelClient::daemon_gone() const {
  pollfd watched{socket_fd_.load(), POLLIN, 0};
  return watched.fd < 0 || (poll(&watched, 1, 0) > 0 && (watched.revents & (POLLHUP | POLLERR | POLLNVAL)) != 0);
}

std::string ChannelClient::error() const {
  const uint32_t status = sheet()->status.load(std::memory_order_acquire);
  if (status == kGenerationFailed) return text_of(sheet()->error);
  if (status == kGenerationSuspended) return text_of(sheet()->suspension);
  if (socket_fd_.load() >= 0 && daemon_gone()) return daemon_lost().message();
  return "";
}

Status ChannelClient::wait_failure(int64_t deadline_ns) {
  std::atomic<uint32_t>* const state = &sheet()->status;
  for (;;) {
    if (Status status = check_usable(); !status) return status;
    if (daemon_gone()) return daemon_lost();
    const int64_t now = now_ns();
    if (deadline_ns >= 0 && now >= deadline_ns) return {Code::kTimeout, "the engine is well"};
    const bool woken = sleep_slice(state, kRunning, now, deadline_ns);
    if (woken && state->load(std::memory_order_acquire) == kRunning) return Status::ok();
  }
}

void ChannelClient::nudge() {
  futex_wake(&sheet()->status);
}

Status ChannelClient::check_usable() const {
  if (getpid() != pid_) {
    return {Code::kInvalid, "this channel belongs to process " + std::to_string(pid_) +
                                ": collective operations can't be called in a forked child"};
  }
  const uint32_t status = sheet()->status.load(std::memory_order_acquire);
  if (status == kGenerationFailed) return {Code::kUnavailable, text_of(sheet()->error)};
  if (status == kGenerationSuspended) return {Code::kRegrouped, text_of(sheet()->suspension)};
  if (socket_fd_.load() < 0) return {Code::kUnavailable, "this rank has closed its channel to the node daemon"};
  return Status::ok();
}

Status ChannelClient::daemon_lost() const {
  const Code code = elastic_.load(std::memory_order_relaxed) ? Code::kRegrouped : Code::kUnavailable;
  return {code, "the node daemon is gone: its end of the socket was closed"};
}

Status ChannelClient::come_back(Fd* page) {
  const Lock lock(request_mutex_);
  if (!orphaned()) return Status::ok();  // another thread was first
  Fd socket;
  if (!dial(path_, now_ns(), &socket)) return not_there();
  std::vector<Fd> descriptors;
  bool answered = false;
  Status status = greet(socket.get(), member_, token_.data(), now_ns() + timeout_ns_, &descriptors, &answered);
  if (!answered) return not_there();
  if (!status) return {Code::kUnavailable, "the node daemon was started again: " + status.message()};
  if (status = offer_memory(socket.get()); !status) return status;
  if (status = take_channel(descriptors[0].get(), descriptors[2].get()); !status) return status;
  *page = std::move(descriptors[1]);
  socket_fd_.store(socket.get());
  socket_ = std::move(socket);
  return Status::ok();
}

Status ChannelClient::offer_memory(int socket) {
  std::vector<std::pair<Request, Fd>> requests;
  if (const uint64_t bytes = required_.load(); bytes != 0) {
    requests.emplace_back(Request(Message::kRequire, bytes), Fd());
  }
  {
    const Lock lock(areas_mutex_);
    for (const auto& [address, area] : areas_) {
      requests.emplace_back(Request(Message::kOffer, area.id), duplicate(area.file.get()));
    }
  }
  for (const auto& [offer, file] : requests) {
    Reply reply;
    bool answered = false;
    const Status status =
        converse(socket, packet_of(offer, {}), file.get(), now_ns() + timeout_ns_, &reply, nullptr, &answered);
    if (!answered) return not_there();
    if (!status) return {Code::kUnavailable, "the node daemon was started again: " + status.message()};
  }
  return Status::ok();
}

// Threads that wait for operations look at the same addresses: they find them ended.
Status ChannelClient::take_channel(int job_page, int channel) {
  std::shared_ptr<Mapping> fresh;
  if (Status status = Mapping::open(channel, sizeof(RankChannel), &fresh); !status) return status;
  auto* const next = reinterpret_cast<RankChannel*>(fresh->data());
  const WriterLock nobody_meets(sheet_mutex_);
  const Lock lock(submit_mutex_);
  deferred_.clear();  // they are regrouped, like those that were submitted
  for (uint32_t index = 0; index < kSlots; ++index) {
    if (tickets_[index] == 0) continue;
    Slot& slot = next->slots[index];
    const Slot& old = this->channel()->slots[index];
    const uint32_t state = old.state.load(std::memory_order_acquire);
    slot.generation = old.generation;
    slot.submitted_ns = old.submitted_ns;
    slot.started_ns = old.started_ns;
    slot.done_ns = old.done_ns;
    slot.state.store(is_over(state) ? state : static_cast<uint32_t>(kRegrouped), std::memory_order_release);
  }
  if (Status status = channel_memory_->replace(channel); !status) return status;
  return page_memory_->replace(job_page);
}

Status ChannelClient::rejoin(int64_t deadline_ns, const Interrupt& interrupt) {
  const int64_t give_up = now_ns() + kComeBackNs;
  for (;;) {
    Fd page;
    const Status status = come_back(&page);
    if (status) return page.valid() ? begin(page.get()) : status;
    if (status.code() != Code::kTimeout) return status;
    const int64_t now = now_ns();
    if (now >= give_up) return {Code::kUnavailable, status.message() + ". It had a minute"};
    if (deadline_ns >= 0 && now >= deadline_ns) return status;
    if (interrupt && interrupt()) return {Code::kAborted, "interrupted"};
    usleep(kLookNs / 1000);
  }
}

Status ChannelClient::ask_anyone(const Request& request, Reply* reply, std::vector<Fd>* descriptors) {
  for (;;) {
    Status status = ask(request, reply, descriptors);
    if (status.code() != Code::kRegrouped || !orphaned()) return status;
    if (status = rejoin(now_ns() + kComeBackNs, nullptr); !status) return status;
  }
}

}  // namespace bagua
