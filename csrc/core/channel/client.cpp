#include "channel/client.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/clock.h"
#include "base/text.h"

namespace bagua {

namespace {

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
    forget_members(comm);
  }
  Reply reply;
  return ask(request, {}, timeout_ns_, &reply, nullptr);
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
