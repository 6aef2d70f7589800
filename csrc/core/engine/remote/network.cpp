#include "engine/remote/network.h"

#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "base/clock.h"
#include "net/crowd.h"

namespace bagua {

namespace {

constexpr size_t kMaxWaiting = 256;    // connections that have not greeted, or have no place yet
constexpr size_t kMaxHandshakes = 64;  // at once
constexpr size_t kOfOneHost = 8;       // of these
constexpr int64_t kGreetingNs = 5 * kNsPerS;
constexpr int64_t kHandshakeNs = 5 * kNsPerS;
constexpr int64_t kPatienceNs = 3 * kNsPerS;  // before a connection that finds no place is looked at

// Connections that may wait for communicators: a part of the descriptors, as what else the process does needs some. The
// handshakes that run at once may exceed it by one each.
size_t most_parked() {
  constexpr rlim_t kPart = 4, kMost = 65536;
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  return static_cast<size_t>(std::min(limit.rlim_cur / kPart, kMost));
}

}  // namespace

Status Network::open() {
  if (state_->membership().hosts.size() < 2) return Status::ok();
  if (Status status = state_->job().listen(); !status) return status;
  if (Status status = wake_.open(); !status) return status;
  most_parked_ = most_parked();
  thread_ = std::thread([this] { run(); });
  return Status::ok();
}

void Network::stop() {
  stopping_.store(true);
  if (thread_.joinable()) {
    wake_.signal();
    thread_.join();
  }
  wake_ = EventFd();
  const Lock lock(mutex_);
  parked_.clear();
  parked_count_ = 0;
}

Status Network::set_peers(const std::vector<std::string>& addresses) {
  const size_t hosts = state_->membership().hosts.size();
  if (addresses.size() != hosts) {
    return {Code::kInvalid,
            "set_peers: " + std::to_string(addresses.size()) + " addresses for " + std::to_string(hosts) + " hosts"};
  }
  if (hosts > 1) {
    for (const std::string& address : addresses) {
      std::string host;
      uint16_t port = 0;
      if (Status status = parse_address(address, &host, &port); !status) return status;
    }
  }
  const Lock lock(mutex_);
  if (!peers_.empty() && peers_ != addresses) {
    return {Code::kInvalid, "set_peers: the addresses of a generation can't change"};
  }
  peers_ = addresses;
  peers_known_.store(true, std::memory_order_release);
  return Status::ok();
}

std::string Network::peer_address(int host) const {
  const Lock lock(mutex_);
  return peers_[static_cast<size_t>(host)];
}

void Network::enroll(uint32_t comm, uint64_t instance, ConnectionTarget* target) {
  const Lock lock(mutex_);
  targets_[{comm, instance}] = target;
  const auto found = parked_.find({comm, instance});
  if (found == parked_.end()) return;
  for (Parked& parked : found->second) {
    if (!target->attach(parked.host, parked.stream, std::move(parked.connection))) count_bad();
  }
  parked_count_ -= found->second.size();
  parked_.erase(found);
}

void Network::wake_targets() {
  const Lock lock(mutex_);
  for (const auto& [key, target] : targets_) target->wake();
}

void Network::withdraw(uint32_t comm, uint64_t instance) {
  const Lock lock(mutex_);
  targets_.erase({comm, instance});
}

void Network::run() {
  std::vector<pollfd> watched;
  while (!stopping_.load()) {
    watched.clear();
    watched.push_back({wake_.fd(), POLLIN, 0});
    const int64_t now = now_ns();
    watched.push_back({pause_.lasts(now) ? -1 : listener(), POLLIN, 0});
    for (const Waiting& waiting : waiting_) {
      watched.push_back({waiting.socket.get(), static_cast<short>(waiting.greeted ? 0 : POLLIN | POLLRDHUP), 0});
    }
    const bool somebody = !waiting_.empty() || anybody_parked();
    const int limit = somebody ? 1000 : -1;  // for a deadline
    if (poll(watched.data(), watched.size(), pause_.timeout_ms(limit, now)) < 0 && errno != EINTR) break;
    if (watched[0].revents != 0) wake_.drain();
    for (size_t i = waiting_.size(); i > 0; --i) {
      const short told = watched[1 + i].revents;
      if (told == 0 || look(&waiting_[i - 1], (told & ~POLLIN) != 0)) continue;
      waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(i - 1));
      count_bad();
    }
    join_finished(false);
    shake_greeted();
    if (watched[1].revents != 0) accept_all();
    expire(now_ns());
    judge_parked(now_ns());
  }
  join_finished(true);
  waiting_.clear();
}

void Network::accept_all() {
  for (size_t taken = 0; taken < kMaxWaiting; ++taken) {
    Waiting fresh{};
    if (Status status = accept_tcp(listener(), &fresh.socket, &fresh.peer); !status) {
      if (status.code() != Code::kResource) return;
      const std::string text = pause_.begin(status.message(), now_ns());
      if (!text.empty()) state_->job().events.tell("scarce", -1, "from other hosts, " + text);
      return;
    }
    if (waiting_.size() >= kMaxWaiting) {
      waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(crowding(waiting_)));
      count_bad();
    }
    fresh.since_ns = now_ns();
    waiting_.push_back(std::move(fresh));
  }
}

void Network::expire(int64_t now) {
  const auto late = std::remove_if(waiting_.begin(), waiting_.end(),
                                   [now](const Waiting& waiting) { return now - waiting.since_ns > kGreetingNs; });
  for (auto it = late; it != waiting_.end(); ++it) count_bad();
  waiting_.erase(late, waiting_.end());
}

bool Network::look(Waiting* waiting, bool ended) {
  char seen[kMostGreeting];
  const int fd = waiting->socket.get();
  const ssize_t got = ::recv(fd, seen, sizeof seen, MSG_PEEK | MSG_DONTWAIT);
  if (got <= 0) return got < 0 && (errno == EAGAIN || errno == EINTR) && !ended;
  const size_t wanted = greeting_length(seen, static_cast<size_t>(got), state_->job().options.credentials);
  waiting->greeted = wanted > 0 && static_cast<size_t>(got) >= wanted;
  if (wanted == 0 || (ended && !waiting->greeted)) return false;
  const int least = waiting->greeted ? 1 : static_cast<int>(wanted);  // bytes of which poll() tells
  return ::setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &least, sizeof least) == 0;
}

void Network::shake_greeted() {
  for (size_t i = 0; i < waiting_.size() && handshakes_.size() < kMaxHandshakes;) {
    const auto same = std::count_if(handshakes_.begin(), handshakes_.end(), [&](const auto& handshake) {
      return host_part(handshake->peer) == host_part(waiting_[i].peer);
    });
    if (!waiting_[i].greeted || static_cast<size_t>(same) >= kOfOneHost) {
      ++i;
      continue;
    }
    shake(std::move(waiting_[i]));
    waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

bool Network::anybody_parked() {
  const Lock lock(mutex_);
  return parked_count_ > 0;
}

// A host may be ahead of us for as long as it likes, but not with a number that means something else here.
void Network::judge_parked(int64_t now) {
  std::vector<std::pair<Key, int>> late;
  {
    const Lock lock(mutex_);
    for (const auto& [key, parked] : parked_) {
      for (const Parked& one : parked) {
        const bool lane = one.stream == state_->job().options.streams;
        if (lane && now - one.since_ns >= kPatienceNs) late.emplace_back(key, one.host);
      }
    }
  }
  for (const auto& [key, host] : late) {
    const std::string problem = judge_(key.first, key.second, host);
    if (!problem.empty()) state_->fail(problem);
  }
}

int Network::Handshake::take() {
  const Lock lock(mutex);
  return std::exchange(fd, -1);
}

void Network::shake(Waiting waiting) {
  auto handshake = std::make_unique<Handshake>();
  Handshake* raw = handshake.get();
  raw->peer = std::move(waiting.peer);
  const int fd = waiting.socket.release();
  {
    const Lock lock(raw->mutex);
    raw->fd = fd;
  }
  const auto talk = [this, raw, fd] {
    const EngineOptions& options = state_->job().options;
    PeerInfo peer;
    Seals seals;
    const Status status =
        accept_handshake(fd, options.credentials, state_->membership().generation, now_ns() + kHandshakeNs, &peer,
                         &seals, [this](const PeerInfo& one) { return has_room(one); });
    Connection connection(Fd(raw->take()), std::move(seals));
    if (status) {
      deliver(peer, std::move(connection));
    } else if (status.code() == Code::kLater) {
      // The other host asks again.
    } else if (status.code() == Code::kAborted) {
      state_->job().counters().frames_dropped.fetch_add(1, std::memory_order_relaxed);
    } else {
      count_bad();
    }
    raw->done.store(true);
    wake_.signal();
  };
  try {
    raw->thread = std::thread(talk);
    handshakes_.push_back(std::move(handshake));
  } catch (const std::system_error&) {  // the other host dials again
    Fd(raw->take()).reset();
    const std::string text = pause_.begin(no_thread_text(), now_ns());
    if (!text.empty()) state_->job().events.tell("scarce", -1, "from other hosts, " + text);
  }
}

bool Network::has_room(const PeerInfo& peer) {
  const Lock lock(mutex_);
  return parked_count_ < most_parked_ || targets_.count({peer.comm, peer.instance}) > 0;
}

void Network::deliver(const PeerInfo& peer, Connection connection) {
  const int me = state_->membership().host_index, streams = state_->job().options.streams;
  const Lock lock(mutex_);
  const bool fits = peer.to == static_cast<uint32_t>(me) && peer.from < static_cast<uint32_t>(me) &&
                    peer.stream <= static_cast<uint32_t>(streams);
  if (!fits || stopping_.load()) return count_bad();
  const Key key{peer.comm, peer.instance};
  const auto found = targets_.find(key);
  const int host = static_cast<int>(peer.from), stream = static_cast<int>(peer.stream);
  if (found != targets_.end()) {
    if (!found->second->attach(host, stream, std::move(connection))) count_bad();
    return;
  }
  parked_[key].push_back({host, stream, std::move(connection), now_ns()});
  ++parked_count_;
}

void Network::join_finished(bool all) {
  for (auto& handshake : handshakes_) {
    if (all) {  // a stranger that says nothing must not hold us up
      const Lock lock(handshake->mutex);
      if (handshake->fd >= 0) shutdown(handshake->fd, SHUT_RDWR);
    }
    if (all || handshake->done.load()) handshake->thread.join();
  }
  handshakes_.erase(std::remove_if(handshakes_.begin(), handshakes_.end(),
                                   [](const auto& handshake) { return !handshake->thread.joinable(); }),
                    handshakes_.end());
}

}  // namespace bagua
