#include "channel/client.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

#include "base/clock.h"
#include "base/text.h"

namespace bagua {

namespace {

constexpr int64_t kSliceNs = 100'000'000;  // how often a waiter looks for signals and for the daemon's death

// Connects with a deadline: the daemon's listen queue may be full for a moment.
Status dial(const std::string& path, int64_t deadline_ns, Fd* out) {
  UnixAddress address;
  if (Status status = unix_address(path, &address); !status) return status;
  *out = Fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!out->valid()) return {Code::kResource, std::string("no Unix socket could be made: ") + errno_text(errno)};
  while (::connect(out->get(), reinterpret_cast<sockaddr*>(address.storage), address.length) != 0) {
    if (errno == EINTR) continue;
    if (errno != EAGAIN || now_ns() >= deadline_ns) {
      return {Code::kUnavailable, "the node daemon's socket " + path + " can't be reached: " + errno_text(errno) +
                                      ". Is the daemon running, and the job still there?"};
    }
    poll(nullptr, 0, 5);  // EAGAIN: the queue is full, and the kernel tells nobody when it drains
  }
  return Status::ok();
}

// By all members of its communicator, in order.
bool matched(const Descriptor& descriptor) {
  const Kind kind = static_cast<Kind>(descriptor.kind);
  return kind != Kind::kSend && kind != Kind::kRecv;
}

Status wait_readable(int fd, int64_t deadline_ns) {
  for (;;) {
    const int64_t left = deadline_ns - now_ns();
    if (left <= 0) return {Code::kTimeout, "the node daemon did not answer in time"};
    pollfd watched{fd, POLLIN, 0};
    const int ready = poll(&watched, 1, static_cast<int>(std::min<int64_t>(left / 1'000'000 + 1, 1000)));
    if (ready > 0) return Status::ok();
    if (ready < 0 && errno != EINTR) return {Code::kUnavailable, std::string("polling failed: ") + errno_text(errno)};
  }
}

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

}  // namespace

ChannelClient::ChannelClient(int member, int64_t timeout_ns)
    : member_(member), pid_(getpid()), timeout_ns_(timeout_ns) {
  for (uint32_t i = kSlots; i > 0; --i) free_.push_back(i - 1);
  tickets_.assign(kSlots, 0);
}

ChannelClient::~ChannelClient() = default;

Status ChannelClient::connect(const std::string& socket, const uint8_t* token, int member, int64_t timeout_ns,
                              std::unique_ptr<ChannelClient>* out) {
  std::unique_ptr<ChannelClient> client(new ChannelClient(member, timeout_ns));
  if (Status status = dial(socket, now_ns() + timeout_ns, &client->socket_); !status) return status;
  client->socket_fd_.store(client->socket_.get());
  if (Status status = client->join(token); !status) return status;
  *out = std::move(client);
  return Status::ok();
}

// The page is read once: whoever scribbles on it later changes nothing here.
Status ChannelClient::begin(int page) {
  std::shared_ptr<Mapping> memory;
  if (Status status = Mapping::open(page, sizeof(GenerationPage), &memory); !status) return status;
  const GenerationPage& sheet = *reinterpret_cast<const GenerationPage*>(memory->data());
  GenerationView view;
  if (Status status = read_view(sheet, member_, &view); !status) return status;
  const Lock meeting(meeting_mutex_);
  const Lock lock(submit_mutex_);
  const bool joins = sheet_memory_ == nullptr;
  if (!joins && view.generation <= generation()) return Status::ok();  // another thread was first
  std::vector<int> local;
  const uint32_t here = sheet.local_ranks;
  for (uint32_t i = 0; i < here && here <= kArrivalRanks; ++i) local.push_back(static_cast<int>(sheet.ranks[i]));
  if (joins) {
    sheet_memory_ = std::move(memory);
    // A spinning waiter must not take a core from the one who works for it: every rank, and a helper for each.
    spins_ = std::max(1u, std::thread::hardware_concurrency()) > 2 * here ? 2000 : 0;
  } else if (Status status = sheet_memory_->replace(page); !status) {
    return status;
  }
  local_ranks_ = std::move(local);
  world_calls_ = 0;
  groups_.clear();
  view_ = std::move(view);
  note_members(0, local_ranks_);
  const auto own = std::find(local_ranks_.begin(), local_ranks_.end(), view_.rank);
  const bool meets = view_.hosts.size() == 1 && here >= 2 && here <= kMeetingRanks && own != local_ranks_.end();
  const auto seat = static_cast<uint32_t>(own - local_ranks_.begin());
  meeting_.reset();
  if (meets) {
    meeting_ = std::make_unique<Meeting>(&this->page()->counters, &this->sheet()->room, seat, here, spins_);
  }
  meeting_ranks_.store(meets ? here : 0, std::memory_order_relaxed);
  generation_.store(view_.generation, std::memory_order_relaxed);
  return Status::ok();
}

Status ChannelClient::enter(int64_t deadline_ns, const Interrupt& interrupt) {
  for (;;) {
    if (getpid() != pid_) return check_usable();
    const uint32_t seen = page()->changes.load();
    Request request;
    request.type = Message::kEnter;
    request.value = generation();
    Reply reply;
    std::vector<Fd> descriptors;
    const Status status = ask(request, {}, timeout_ns_, &reply, &descriptors);
    if (status.code() == Code::kDismissed) return status;
    if (!status) {
      const bool failed = sheet()->status.load(std::memory_order_acquire) == kGenerationFailed;
      return {Code::kUnavailable, failed ? text_of(sheet()->error) : status.message()};
    }
    if (!descriptors.empty()) return begin(descriptors.front().get());
    if (Status waited = await_change(seen, deadline_ns, interrupt); !waited) return waited;
  }
}

Status ChannelClient::await_change(uint32_t seen, int64_t deadline_ns, const Interrupt& interrupt) {
  std::atomic<uint32_t>* const changes = &page()->changes;
  while (changes->load() == seen) {
    const int64_t now = now_ns(), slice = now + kSliceNs;
    if (deadline_ns >= 0 && now >= deadline_ns) return {Code::kTimeout, "there is no next generation yet"};
    const Wake wake = futex_wait(changes, seen, deadline_ns >= 0 ? std::min(slice, deadline_ns) : slice);
    if (wake == Wake::kWoken) continue;
    if (interrupt && interrupt()) return {Code::kAborted, "interrupted"};
    if (daemon_gone()) return Status::ok();  // the next question says so
  }
  return Status::ok();
}

GenerationView ChannelClient::view() {
  const Lock lock(submit_mutex_);
  return view_;
}

void ChannelClient::note_members(uint32_t comm, const std::vector<int>& ranks) {
  Group group;
  bool found = false;
  for (uint32_t i = 0; i < local_ranks_.size(); ++i) {
    const int rank = local_ranks_[i];
    if (std::find(ranks.begin(), ranks.end(), rank) == ranks.end()) continue;
    ++group.local_members;
    found = found || rank == view_.rank;
    if (rank == view_.rank) {
      group.own = i;
    } else {
      group.others.push_back(i);
    }
  }
  group.one_host = comm == 0 ? view_.hosts.size() == 1 : group.local_members == ranks.size();
  group.counted = found && comm < kArrivalComms;
  groups_[comm] = std::move(group);
}

Status ChannelClient::join(const uint8_t* token) {
  Request request;
  request.type = Message::kHello;
  request.version = kLayoutVersion;
  request.member = static_cast<uint32_t>(member_);
  memcpy(request.token, token, kTokenBytes);
  Reply reply;
  std::vector<Fd> descriptors;
  if (Status status = ask(request, {}, timeout_ns_, &reply, &descriptors); !status) return status;
  if (descriptors.size() != 3 || reply.bytes != sizeof(RankChannel)) {
    return {Code::kCorrupt, "the node daemon's answer lacks the shared memory"};
  }
  if (Status status = Mapping::open(descriptors[0].get(), sizeof(JobPage), &page_memory_); !status) return status;
  if (Status status = Mapping::open(descriptors[2].get(), sizeof(RankChannel), &channel_memory_); !status)
    return status;
  return begin(descriptors[1].get());
}

Status ChannelClient::ask(const Request& request, const std::vector<int>& members, int64_t timeout_ns, Reply* reply,
                          std::vector<Fd>* descriptors) {
  if (getpid() != pid_) return check_usable();
  std::vector<char> packet(sizeof request + members.size() * sizeof(uint32_t));
  memcpy(packet.data(), &request, sizeof request);
  for (size_t i = 0; i < members.size(); ++i) {
    const uint32_t member = static_cast<uint32_t>(members[i]);
    memcpy(packet.data() + sizeof request + i * sizeof member, &member, sizeof member);
  }
  const int64_t deadline = now_ns() + timeout_ns;
  const Lock lock(request_mutex_);
  if (!socket_.valid()) return {Code::kUnavailable, "this rank has closed its channel to the node daemon"};
  Status status = send_packet(socket_.get(), packet.data(), packet.size(), nullptr, 0);
  size_t bytes = 0;
  while (status) {
    status = wait_readable(socket_.get(), deadline);
    if (!status) break;
    status = receive_packet(socket_.get(), reply, sizeof *reply, &bytes, descriptors);
    if (status.code() != Code::kTimeout) break;
    status = Status::ok();
  }
  if (status.code() == Code::kUnavailable || (status && bytes == 0)) {
    return {Code::kUnavailable, "the node daemon is gone: its end of the socket was closed"};
  }
  if (status && (bytes != sizeof *reply || reply->magic != kProtocolMagic)) {
    status = {Code::kCorrupt, "the node daemon answered with something unknown"};
  }
  if (!status) {
    // The answer may still come and would be taken for that of the next request.
    if (socket_.valid()) shutdown(socket_.get(), SHUT_RDWR);
    return status;
  }
  reply->text[kReplyText - 1] = '\0';
  return {static_cast<Code>(reply->code), reply->text};
}

Status ChannelClient::alloc(uint64_t bytes, Allocation* out) {
  Request request;
  request.type = Message::kAlloc;
  request.value = bytes;
  Reply reply;
  std::vector<Fd> descriptors;
  if (Status status = ask(request, {}, timeout_ns_, &reply, &descriptors); !status) return status;
  if (descriptors.size() != 1 || reply.bytes < bytes) {
    return {Code::kCorrupt, "the node daemon's answer lacks the shared memory"};
  }
  out->id = reply.value;
  if (Status status = Mapping::open(descriptors[0].get(), reply.bytes, &out->memory); !status) return status;
  const Lock lock(areas_mutex_);
  areas_[out->memory->data()] = {out->memory->bytes(), out->id};
  return Status::ok();
}

void ChannelClient::keep(Allocation allocation) {
  const Lock lock(areas_mutex_);
  kept_[allocation.id] = std::move(allocation.memory);
}

bool ChannelClient::locate(const void* data, size_t bytes, uint32_t* segment, uint64_t* offset) {
  const char* const begin = static_cast<const char*>(data);
  const Lock lock(areas_mutex_);
  auto found = areas_.upper_bound(begin);
  if (found == areas_.begin()) return false;
  --found;
  const uint64_t past = static_cast<uint64_t>(begin - found->first);
  if (past > found->second.bytes || bytes > found->second.bytes - past) return false;
  *segment = static_cast<uint32_t>(found->second.id);
  *offset = past;
  return true;
}

Status ChannelClient::require(uint64_t bytes) {
  Request request;
  request.type = Message::kRequire;
  request.value = bytes;
  Reply reply;
  return ask(request, {}, timeout_ns_, &reply, nullptr);
}

Status ChannelClient::free_segment(uint64_t id) {
  {
    const Lock lock(areas_mutex_);
    for (auto it = areas_.begin(); it != areas_.end();) it = it->second.id == id ? areas_.erase(it) : std::next(it);
    kept_.erase(id);
  }
  Request request;
  request.type = Message::kFree;
  request.value = id;
  Reply reply;
  return ask(request, {}, timeout_ns_, &reply, nullptr);
}

Status ChannelClient::create_comm(uint32_t comm, const std::vector<int>& ranks, int64_t timeout_ns) {
  if (ranks.empty() || ranks.size() > kMaxMembers) {
    return {Code::kInvalid, "a communicator has 1 to " + std::to_string(kMaxMembers) + " members"};
  }
  Request request;
  request.type = Message::kComm;
  request.value = comm;
  request.members = static_cast<uint32_t>(ranks.size());
  Reply reply;
  if (Status status = ask(request, ranks, timeout_ns, &reply, nullptr); !status) return status;
  const Lock lock(submit_mutex_);
  note_members(comm, ranks);
  return Status::ok();
}

Status ChannelClient::destroy_comm(uint32_t comm) {
  Request request;
  request.type = Message::kDestroyComm;
  request.value = comm;
  {
    const Lock lock(submit_mutex_);
    if (comm != 0) groups_.erase(comm);
  }
  Reply reply;
  return ask(request, {}, timeout_ns_, &reply, nullptr);
}

bool ChannelClient::daemon_gone() const {
  pollfd watched{socket_fd_.load(), POLLIN, 0};
  return watched.fd < 0 || (poll(&watched, 1, 0) > 0 && (watched.revents & (POLLHUP | POLLERR | POLLNVAL)) != 0);
}

std::string ChannelClient::error() const {
  const uint32_t status = sheet()->status.load(std::memory_order_acquire);
  if (status == kGenerationFailed) return text_of(sheet()->error);
  if (status == kGenerationSuspended) return text_of(sheet()->suspension);
  if (socket_fd_.load() >= 0 && daemon_gone()) return "the node daemon is gone: its end of the socket was closed";
  return "";
}

Status ChannelClient::wait_failure(int64_t deadline_ns) {
  std::atomic<uint32_t>* const state = &sheet()->status;
  for (;;) {
    if (Status status = check_usable(); !status) return status;
    if (daemon_gone()) return {Code::kUnavailable, "the node daemon is gone: its end of the socket was closed"};
    const int64_t now = now_ns();
    if (deadline_ns >= 0 && now >= deadline_ns) return {Code::kTimeout, "the engine is well"};
    const int64_t slice = now + kSliceNs;
    const Wake wake = futex_wait(state, kRunning, deadline_ns >= 0 ? std::min(slice, deadline_ns) : slice);
    if (wake == Wake::kWoken && state->load(std::memory_order_acquire) == kRunning) return Status::ok();
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

bool ChannelClient::on_one_host(uint32_t comm) {
  const Lock lock(submit_mutex_);
  const auto found = groups_.find(comm);
  return found != groups_.end() && found->second.one_host;
}

bool ChannelClient::completes(const Descriptor& descriptor) {
  if (!matched(descriptor)) return true;
  const auto found = groups_.find(descriptor.comm);
  if (found == groups_.end() || !found->second.counted) return true;
  Group& group = found->second;
  std::atomic<uint64_t>* const counts = sheet()->arrivals[descriptor.comm].submitted;
  const uint64_t mine = ++group.submitted;
  counts[group.own].store(mine);
  for (const uint32_t other : group.others) {
    if (counts[other].load() < mine) return false;
  }
  return true;
}

Status ChannelClient::left_behind() const {
  return {Code::kRegrouped, "this operation began in a generation before " + std::to_string(generation())};
}

Status ChannelClient::meet(const Descriptor& descriptor, uint64_t generation, const char* src, char* dst,
                           const Interrupt& interrupt, bool* met) {
  if (Status status = check_usable(); !status) return status;
  const Lock one(meeting_mutex_);
  if (generation != this->generation() || meeting_ == nullptr) return left_behind();
  uint32_t number;
  {
    const Lock lock(submit_mutex_);
    number = ++world_calls_;
  }
  const auto usable = [this] {
    if (Status status = check_usable(); !status) return status;
    return daemon_gone() ? Status{Code::kUnavailable, error()} : Status::ok();
  };
  return meeting_->attend(number, descriptor, src, dst, usable, interrupt, met);
}

Status ChannelClient::submit(const Descriptor& descriptor, uint64_t* ticket, const Submission& how) {
  if (Status status = check_usable(); !status) return status;
  bool complete = false;
  {
    const Lock lock(submit_mutex_);
    if (how.generation != 0 && how.generation != generation()) return left_behind();
    if (free_.empty()) {
      return {Code::kResource, std::to_string(kSlots) +
                                   " operations have been submitted and not been waited for: wait for the older ones"};
    }
    const uint32_t index = free_.back();
    free_.pop_back();
    *ticket = next_ticket_++ * kSlots + index;
    tickets_[index] = *ticket;
    Slot* slot = &channel()->slots[index];
    slot->descriptor = descriptor;
    slot->generation = static_cast<uint32_t>(generation());
    slot->submitted_ns = now_ns();
    slot->state.store(kSubmitted, std::memory_order_relaxed);
    const uint64_t tail = channel()->tail.load(std::memory_order_relaxed);
    channel()->ring[tail % kSlots] = index;
    channel()->tail.store(tail + 1, std::memory_order_release);
    if (descriptor.comm == 0 && !how.counted && matched(descriptor)) ++world_calls_;
    complete = completes(descriptor);
  }
  if (!complete && sheet()->status.load() == kRunning) return Status::ok();
  if (how.ring != nullptr) {
    *how.ring = true;
  } else {
    this->ring();
  }
  return Status::ok();
}

void ChannelClient::ring() {
  JobPage* job = page();
  job->doorbell.fetch_add(1);  // both sequentially consistent: either we see it sleeping or it sees the new number
  if (job->sleeping.load() != 0 && job->sleeping.exchange(0) != 0) futex_wake(&job->doorbell);
}

Status ChannelClient::slot_of(uint64_t ticket, uint32_t* slot) {
  const Lock lock(submit_mutex_);
  *slot = static_cast<uint32_t>(ticket % kSlots);
  if (ticket == 0 || tickets_[*slot] != ticket) {
    return {Code::kInvalid, "ticket " + std::to_string(ticket) + " is unknown: each ticket is waited for once"};
  }
  return Status::ok();
}

void ChannelClient::release(uint32_t slot) {
  const Lock lock(submit_mutex_);
  channel()->slots[slot].state.store(kFree, std::memory_order_relaxed);
  tickets_[slot] = 0;
  free_.push_back(slot);
}

Status ChannelClient::done(uint64_t ticket, bool* done) {
  uint32_t index;
  if (Status status = slot_of(ticket, &index); !status) return status;
  const uint32_t state = channel()->slots[index].state.load(std::memory_order_acquire);
  *done = is_over(state) || daemon_gone();
  return Status::ok();
}

Status ChannelClient::wait(uint64_t ticket, int64_t deadline_ns, const Interrupt& interrupt, Times* times) {
  if (getpid() != pid_) return check_usable();
  uint32_t index;
  if (Status status = slot_of(ticket, &index); !status) return status;
  uint32_t state = kSubmitted;
  if (Status status = await(&channel()->slots[index], deadline_ns, interrupt, &state); !status) return status;
  return finish(index, state, times);
}

Status ChannelClient::await(Slot* slot, int64_t deadline_ns, const Interrupt& interrupt, uint32_t* state) {
  for (int spin = 0;; ++spin) {
    *state = slot->state.load(std::memory_order_acquire);
    if (is_over(*state)) return Status::ok();
    if (spin >= spins_) break;
    spin_pause();
  }
  for (;;) {
    // The state says that somebody sleeps; the daemon then wakes. If it got ahead of us, the exchange fails.
    uint32_t expected = kSubmitted;
    slot->state.compare_exchange_strong(expected, kSubmittedWaiting, std::memory_order_acq_rel);
    const int64_t now = now_ns();
    const bool late = deadline_ns >= 0 && now >= deadline_ns;
    Wake wake = Wake::kTimeout;
    if (!late) {
      const int64_t slice = now + kSliceNs;
      wake = futex_wait(&slot->state, kSubmittedWaiting, deadline_ns >= 0 ? std::min(slice, deadline_ns) : slice);
    }
    *state = slot->state.load(std::memory_order_acquire);
    if (is_over(*state)) return Status::ok();
    if (late) return {Code::kTimeout, "not done yet"};
    if (wake == Wake::kWoken) continue;
    if (interrupt && interrupt()) return {Code::kAborted, "interrupted"};
    if (daemon_gone()) {
      *state = kFailed;  // nobody will ever complete it
      return Status::ok();
    }
  }
}

Status ChannelClient::finish(uint32_t slot, uint32_t state, Times* times) {
  const Slot& done = channel()->slots[slot];
  times->submitted_ns = done.submitted_ns;
  times->started_ns = done.started_ns;
  times->done_ns = done.done_ns;
  // Read the reason first: the slot may be taken by another thread once it is released.
  std::string why = state == kDone ? "" : error();
  const bool gone = state == kFailed && daemon_gone();
  const uint32_t generation = done.generation;
  if (!gone) release(slot);  // else the daemon may be dying and still write: leave the slot alone
  if (state == kDone) return Status::ok();
  if (state == kRegrouped) {
    return {Code::kRegrouped, why.empty() ? "generation " + std::to_string(generation) + " has ended" : why};
  }
  if (why.empty()) why = gone ? "this rank has closed its channel to the node daemon" : "the operation failed";
  return {Code::kUnavailable, why};
}

void ChannelClient::close() {
  if (getpid() == pid_) {
    Request request;
    request.type = Message::kBye;
    Reply reply;
    // The channel is closed, whatever the answer.
    static_cast<void>(ask(request, {}, std::min<int64_t>(timeout_ns_, 2'000'000'000), &reply, nullptr));
  }
  const Lock lock(request_mutex_);
  socket_fd_.store(-1);
  socket_.reset();
}

}  // namespace bagua
