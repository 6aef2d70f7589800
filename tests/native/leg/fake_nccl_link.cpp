#include "fake_nccl_link.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>

namespace fake {

namespace {

constexpr int kPollMs = 10;

sockaddr_un address_of(const std::string& name, int rank, socklen_t* length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;  // abstract: begins with a zero
  const std::string path = name + "-" + std::to_string(rank);
  memcpy(address.sun_path + 1, path.data(), path.size());
  *length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + path.size());
  return address;
}

// Whole buffers at connect; small ones.
bool transfer(int fd, char* data, size_t bytes, bool out, const std::atomic<bool>& aborted) {
  while (bytes > 0) {
    if (aborted) return false;
    pollfd watched{fd, static_cast<short>(out ? POLLOUT : POLLIN), 0};
    if (poll(&watched, 1, kPollMs) <= 0) continue;
    const ssize_t n = out ? send(fd, data, bytes, MSG_NOSIGNAL | MSG_DONTWAIT) : recv(fd, data, bytes, MSG_DONTWAIT);
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) return false;
    if (n > 0) data += n, bytes -= static_cast<size_t>(n);
  }
  return true;
}

struct Progress {
  size_t sent = 0, got = 0;  // headers included
  Header theirs{};
};

bool push(int fd, const Piece& piece, Progress* p) {
  const bool head = p->sent < sizeof(Header);
  const char* const from =
      head ? reinterpret_cast<const char*>(&piece.header) + p->sent : piece.out + (p->sent - sizeof(Header));
  const size_t left = head ? sizeof(Header) - p->sent : sizeof(Header) + piece.out_bytes - p->sent;
  const ssize_t n = send(fd, from, left, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (n > 0) p->sent += static_cast<size_t>(n);
  return n > 0 || errno == EAGAIN || errno == EINTR;
}

bool pull(int fd, const Piece& piece, Progress* p) {
  const bool head = p->got < sizeof(Header);
  char* const to = head ? reinterpret_cast<char*>(&p->theirs) + p->got : piece.in + (p->got - sizeof(Header));
  const size_t left = head ? sizeof(Header) - p->got : sizeof(Header) + piece.in_bytes - p->got;
  const ssize_t n = recv(fd, to, left, MSG_DONTWAIT);
  if (n > 0) p->got += static_cast<size_t>(n);
  return n > 0 || (n < 0 && (errno == EAGAIN || errno == EINTR));
}

bool alike(const Header& a, const Header& b) {
  return a.sequence == b.sequence && a.what == b.what && a.type == b.type && a.op == b.op && a.root == b.root &&
         a.count == b.count;
}

}  // namespace

Links::~Links() {
  for (const int fd : sockets_) {
    if (fd >= 0) close(fd);
  }
}

Result Links::connect(const std::string& name, int ranks, int rank, const std::atomic<bool>& aborted, const char* about,
                      std::vector<char>* all) {
  rank_ = rank;
  sockets_.assign(static_cast<size_t>(ranks), -1);
  socklen_t length = 0;
  const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const sockaddr_un own = address_of(name, rank, &length);
  if (bind(listener, reinterpret_cast<const sockaddr*>(&own), length) != 0 || listen(listener, 64) != 0) {
    close(listener);
    return Result::kGone;
  }
  for (int peer = 0; peer < rank && !aborted; ++peer) {
    const sockaddr_un there = address_of(name, peer, &length);
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    while (::connect(fd, reinterpret_cast<const sockaddr*>(&there), length) != 0 && !aborted) {
      poll(nullptr, 0, 2);  // nobody tells when the other one listens
    }
    int32_t me = rank;
    transfer(fd, reinterpret_cast<char*>(&me), sizeof(me), true, aborted);
    sockets_[static_cast<size_t>(peer)] = fd;
  }
  for (int missing = ranks - 1 - rank; missing > 0 && !aborted;) {
    pollfd watched{listener, POLLIN, 0};
    if (poll(&watched, 1, kPollMs) <= 0) continue;
    const int fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    int32_t who = -1;
    transfer(fd, reinterpret_cast<char*>(&who), sizeof(who), false, aborted);
    if (who > rank && who < ranks) sockets_[static_cast<size_t>(who)] = fd, --missing;
  }
  close(listener);
  if (aborted) return Result::kAborted;
  constexpr size_t kAbout = 64;
  all->assign(kAbout * static_cast<size_t>(ranks), 0);
  std::vector<Piece> pieces;
  for (int peer = 0; peer < ranks; ++peer) {
    char* const place = all->data() + kAbout * static_cast<size_t>(peer);
    if (peer == rank) memcpy(place, about, kAbout);
    if (peer != rank) pieces.push_back({peer, about, kAbout, place, kAbout, {0, 0, 0, 0, 0, kAbout, kAbout}});
  }
  std::string why;
  return exchange(&pieces, aborted, &why);
}

// `what` of a piece without output or input still exchanges headers: mismatches are seen on both sides.
Result Links::exchange(std::vector<Piece>* pieces, const std::atomic<bool>& aborted, std::string* why) {
  std::vector<Progress> progress(pieces->size());
  for (;;) {
    if (aborted) return Result::kAborted;
    std::vector<pollfd> watched;
    std::vector<size_t> whose;
    for (size_t i = 0; i < pieces->size(); ++i) {
      const Piece& piece = (*pieces)[i];
      short events = 0;
      if (progress[i].sent < sizeof(Header) + piece.out_bytes) events |= POLLOUT;
      if (progress[i].got < sizeof(Header) + piece.in_bytes) events |= POLLIN;
      if (events == 0) continue;
      watched.push_back({sockets_[static_cast<size_t>(piece.peer)], events, 0});
      whose.push_back(i);
    }
    if (watched.empty()) return Result::kOk;
    if (poll(watched.data(), watched.size(), kPollMs) <= 0) continue;
    for (size_t w = 0; w < watched.size(); ++w) {
      const Piece& piece = (*pieces)[whose[w]];
      Progress* const p = &progress[whose[w]];
      if ((watched[w].revents & POLLOUT) != 0 && !push(watched[w].fd, piece, p)) return Result::kGone;
      if ((watched[w].revents & (POLLIN | POLLHUP | POLLERR)) == 0) continue;
      const bool had_head = p->got >= sizeof(Header);
      if ((watched[w].events & POLLIN) == 0 || !pull(watched[w].fd, piece, p)) return Result::kGone;
      if (had_head || p->got < sizeof(Header)) continue;
      if (!alike(piece.header, p->theirs) || p->theirs.payload != piece.in_bytes) {
        *why = "operation " + std::to_string(piece.header.what) + " #" + std::to_string(piece.header.sequence) +
               " met operation " + std::to_string(p->theirs.what) + " #" + std::to_string(p->theirs.sequence) +
               ", payload " + std::to_string(p->theirs.payload) + " for " + std::to_string(piece.in_bytes);
        return Result::kMismatch;
      }
    }
  }
}

}  // namespace fake
