#include "channel/client.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "base/clock.h"

namespace bagua {

namespace {

constexpr int64_t kDeferredNs = kNsPerS;   // then nobody waits for it: an exception may have come between
constexpr int64_t kFenceLookNs = kNsPerS;  // a suspended machine wakes up later than a timer believes

}  // namespace

ChannelClient::ChannelClient(std::string path, const uint8_t* token, int member, int64_t timeout_ns)
    : member_(member), pid_(getpid()), timeout_ns_(timeout_ns), path_(std::move(path)) {
  std::copy_n(token, kTokenBytes, token_.begin());
  for (uint32_t i = kSlots; i > 0; --i) free_.push_back(i - 1);
  tickets_.assign(kSlots, 0);
}

ChannelClient::~ChannelClient() {
  if (fence_watch_ == nullptr || getpid() != pid_) return;
  closing_.store(1);
  futex_wake(&closing_);
  fence_watch_->join();
  delete fence_watch_;
}

// While the daemon's socket is open the daemon may be stopped, and its keeper with it. Where it has died the keeper
// runs.
void ChannelClient::watch_fence() {
  while (closing_.load() == 0) {
    const int64_t now = boottime_ns();
    const auto at = static_cast<int64_t>(page()->fence.load(std::memory_order_relaxed));
    if (at != 0 && now >= at && !daemon_gone()) kill(getpid(), SIGSTOP);
    const int64_t left = at > now ? std::min(at - now, kFenceLookNs) : kFenceLookNs;
    submit_deferred_if([](const Deferred& one) { return now_ns() - one.since_ns > kDeferredNs; });
    futex_wait(&closing_, 0, now_ns() + left);
  }
}

Status ChannelClient::connect(const std::string& socket, const uint8_t* token, int member, int64_t timeout_ns,
                              std::unique_ptr<ChannelClient>* out) {
  std::unique_ptr<ChannelClient> client(new ChannelClient(socket, token, member, timeout_ns));
  if (Status status = dial(socket, now_ns() + timeout_ns, &client->socket_); !status) return status;
  client->socket_fd_.store(client->socket_.get());
  if (Status status = client->join(); !status) return status;
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // the program's handlers run in its own threads
  client->fence_watch_ = new std::thread([self = client.get()] { self->watch_fence(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  *out = std::move(client);
  return Status::ok();
}

Status ChannelClient::join() {
  std::vector<Fd> descriptors;
  bool answered = false;
  const Status status = greet(socket_.get(), member_, token_.data(), now_ns() + timeout_ns_, &descriptors, &answered);
  if (!answered && status.code() == Code::kUnavailable) return daemon_lost();
  if (!status) return status;
  if (Status status = Mapping::open(descriptors[0].get(), sizeof(JobPage), &page_memory_); !status) return status;
  if (Status status = Mapping::open(descriptors[2].get(), sizeof(RankChannel), &channel_memory_); !status)
    return status;
  return begin(descriptors[1].get());
}

Status ChannelClient::ask(const Request& request, const std::vector<int>& members, int64_t timeout_ns, Reply* reply,
                          std::vector<Fd>* descriptors) {
  if (getpid() != pid_) return check_usable();
  const Lock lock(request_mutex_);
  if (!socket_.valid()) return {Code::kUnavailable, "this rank has closed its channel to the node daemon"};
  Reply unread;
  bool answered = false;
  const Status status = converse(socket_.get(), packet_of(request, members), -1, now_ns() + timeout_ns,
                                 reply != nullptr ? reply : &unread, descriptors, &answered);
  return answered || status.code() != Code::kUnavailable ? status : daemon_lost();
}

Status ChannelClient::alloc(uint64_t bytes, Allocation* out, bool for_peers) {
  const Request request(for_peers ? Message::kAllocForPeers : Message::kAlloc, bytes);
  Reply reply;
  std::vector<Fd> descriptors;
  if (Status status = ask_anyone(request, &reply, &descriptors); !status) return status;
  if (descriptors.size() != 1 || reply.bytes < bytes) {
    return {Code::kCorrupt, "the node daemon's answer lacks the shared memory"};
  }
  out->id = reply.value;
  if (Status status = Mapping::open(descriptors[0].get(), reply.bytes, &out->memory); !status) return status;
  const Lock lock(areas_mutex_);
  Fd file;
  if (elastic_.load(std::memory_order_relaxed)) file = std::move(descriptors.front());
  areas_[out->memory->data()] = {out->memory->bytes(), out->id, std::move(file)};
  return Status::ok();
}

Status ChannelClient::borrow(uint32_t owner, uint64_t id, Allocation* out) {
  Request request(Message::kBorrow, id);
  request.member = owner;
  Reply reply;
  std::vector<Fd> descriptors;
  if (Status status = ask(request, &reply, &descriptors); !status) return status;
  if (descriptors.size() != 1) return {Code::kCorrupt, "the node daemon's answer lacks the shared memory"};
  out->id = id;
  return Mapping::open(descriptors[0].get(), reply.bytes, &out->memory);
}

void ChannelClient::keep(Allocation allocation) {
  const Lock lock(areas_mutex_);
  const char* const begin = allocation.memory->data();
  areas_[begin].kept = std::move(allocation.memory);
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
  required_.store(bytes);
  return ask_anyone(Request(Message::kRequire, bytes));
}

Status ChannelClient::free_segment(uint64_t id) {
  // The garbage collector of a forked child comes here. Another thread of the parent may have held the lock.
  if (getpid() != pid_) return check_usable();
  submit_deferred_if([id](const Deferred& one) {  // the daemon then sees that they need this memory
    return one.descriptor.src_segment == id || one.descriptor.dst_segment == id;
  });
  {
    const Lock lock(areas_mutex_);
    for (auto it = areas_.begin(); it != areas_.end();) it = it->second.id == id ? areas_.erase(it) : std::next(it);
  }
  const Status status = ask(Request(Message::kFree, id));
  return status.code() == Code::kRegrouped ? Status::ok() : status;  // the next daemon does not know of it
}

Status ChannelClient::create_comm(uint32_t comm, const std::vector<int>& ranks, int64_t timeout_ns) {
  if (ranks.empty() || ranks.size() > kMaxMembers) {
    return {Code::kInvalid, "a communicator has 1 to " + std::to_string(kMaxMembers) + " members"};
  }
  Request request(Message::kComm, comm);
  request.generation = static_cast<uint32_t>(generation());
  request.members = static_cast<uint32_t>(ranks.size());
  Reply reply;
  if (Status status = ask(request, ranks, timeout_ns, &reply); !status) return status;
  if (reply.value > kRooms) return {Code::kCorrupt, "the node daemon's answer names a room that does not exist"};
  const Lock lock(submit_mutex_);
  if (static_cast<uint32_t>(generation()) != request.generation) return left_behind();
  // A communicator that is declared again goes on: its meetings are numbered.
  if (groups_.count(comm) == 0) note_members(comm, ranks, static_cast<uint32_t>(reply.value));
  return Status::ok();
}

Status ChannelClient::destroy_comm(uint32_t comm) {
  Request request(Message::kDestroyComm, comm);
  request.generation = static_cast<uint32_t>(generation());
  submit_all_deferred(comm);
  if (comm != 0) {
    if (const std::shared_ptr<Meeting> meeting = meeting_of(comm); meeting != nullptr) meeting->await_end();
    const Lock lock(submit_mutex_);
    if (static_cast<uint32_t>(generation()) != request.generation) return Status::ok();  // it has ended with its own
    groups_.erase(comm);
  }
  const Status status = ask(request);
  return status.code() == Code::kRegrouped ? Status::ok() : status;  // the next daemon does not know of it
}

void ChannelClient::close(const std::string& words) {
  part(Request(Message::kBye), words);
}

void ChannelClient::fail(const std::string& text, bool lost) {
  part(Request(Message::kFailed, lost ? 1 : 0), text);
}

void ChannelClient::part(Request request, const std::string& words) {
  if (getpid() == pid_) submit_deferred_if([](const Deferred&) { return true; });
  const Lock lock(request_mutex_);
  if (getpid() == pid_ && socket_.valid()) {
    const std::string told = words.substr(0, kMaxWords);
    request.members = static_cast<uint32_t>(told.size());
    std::vector<char> packet = packet_of(request, {});
    packet.insert(packet.end(), told.begin(), told.end());
    Reply reply;
    bool answered = false;
    const int64_t deadline = now_ns() + std::min<int64_t>(timeout_ns_, 2'000'000'000);
    // The channel is closed, whatever the answer.
    static_cast<void>(converse(socket_.get(), packet, -1, deadline, &reply, nullptr, &answered));
  }
  socket_fd_.store(-1);
  socket_.reset();
}

}  // namespace bagua
