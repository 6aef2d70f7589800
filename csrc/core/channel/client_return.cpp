// The rank of an elastic job outlives its daemon: it joins the one that is started in its place, with its memory.
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "base/clock.h"
#include "channel/client.h"

namespace bagua {

namespace {

constexpr int64_t kComeBackNs = 60'000'000'000;  // without a daemon; its keeper would have ended this rank
constexpr int64_t kLookNs = 10'000'000;          // between two looks for it

// Nobody has answered, or not to the end: the next daemon may be starting, or have died as well.
Status not_there() {
  return {Code::kTimeout, "the node daemon is gone, and has not come back yet"};
}

}  // namespace

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
  std::vector<std::pair<Request, int>> requests;
  const Lock lock(areas_mutex_);
  if (const uint64_t bytes = required_.load(); bytes != 0) requests.emplace_back(Request(Message::kRequire, bytes), -1);
  for (const auto& [address, area] : areas_) {
    requests.emplace_back(Request(Message::kOffer, area.id), area.file.get());
  }
  for (const auto& [offer, file] : requests) {
    Reply reply;
    bool answered = false;
    const Status status =
        converse(socket, packet_of(offer, {}), file, now_ns() + timeout_ns_, &reply, nullptr, &answered);
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
