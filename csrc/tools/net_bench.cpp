// One of the two processes of `bagua bench net`: sends messages through NCCL's network plugin or through plain sockets.
//
//     net_bench plugin LIBRARY            the plugin's table (v11), driven as NCCL's proxy thread drives it
//     net_bench sockets ADDRESS N         blocking program: N connections, N threads, each its share of every message
//     net_bench nccl ADDRESS              NCCL's own protocol on sockets (2.28), driven in the same way
//     net_bench polling ADDRESS           one connection, never blocking: less work per message than NCCL's own
//
// Both ends print "handle HEX", read the other's HEX, connect (one connection per direction) and print "ready". Then
// they execute lines of standard input: "send|receive stream|ping SIZE COUNT", and print the nanoseconds of each. Not
// part of the core.
#include <arpa/inet.h>
#include <dlfcn.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <condition_variable>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <iostream>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr int kWindow = 8;                        // messages in flight: the same as NCCL's steps per buffer
constexpr size_t kMostMemory = size_t{64} << 20;  // for all buffers together, but there are at least two
constexpr size_t kAnswerBytes = 8;
constexpr size_t kSmallestShare = size_t{64} << 10;  // of a message on one of several sockets, as in NCCL's own sockets
constexpr size_t kHandleBytes = 128;

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "net_bench: %s\n", what.c_str());
  std::exit(1);
}

[[noreturn]] void fail_errno(const std::string& what) {
  fail(what + ": " + std::strerror(errno));
}

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}

// Buffers of `size` bytes, which messages use in turn.
struct Slots {
  explicit Slots(size_t message)
      : size(message),
        count(static_cast<int>(std::clamp<size_t>(kMostMemory / std::max<size_t>(message, 1), 2, kWindow))),
        memory(size * static_cast<size_t>(count) + 64, 'x') {}
  char* operator[](int message) { return memory.data() + size * static_cast<size_t>(message % count); }
  const size_t size;
  const int count;
  std::vector<char> memory;
  void* send_key = nullptr;  // the plugin's handle of this memory
  void* receive_key = nullptr;
};

// Connections in both directions to the other process.
class Link {
 public:
  virtual ~Link() = default;
  virtual std::string handle() = 0;
  virtual void meet(const std::string& other) = 0;
  virtual void send(Slots& slots, int count) = 0;
  virtual void receive(Slots& slots, int count) = 0;
  virtual void enroll(Slots&) {}  // called before messages use these buffers
  virtual void dismiss(Slots&) {}
};

// Posts `count` requests, `window` at a time, and tests the oldest until all are done, as NCCL's proxy thread does.
// post(message) returns true if the request was taken, test(message) if it is complete.
template <typename Post, typename Test>
void drive(int count, int window, const Post& post, const Test& test) {
  int posted = 0;
  for (int finished = 0; finished < count;) {
    bool idle = true;
    if (posted < count && posted - finished < window && post(posted)) ++posted, idle = false;
    if (finished < posted && test(finished)) ++finished, idle = false;
    if (idle) sched_yield();
  }
}

// ---- NCCL's plugin

// ncclNet_v11_t; only the functions that are used have their arguments.
struct Table {
  const char* name;
  int (*init)(void** context, uint64_t id, int* traffic_class, void* logger, void* profiler);
  int (*devices)(int* count);
  int (*properties)(int device, void* properties);
  int (*listen)(void* context, int device, void* handle, void** comm);
  int (*connect)(void* context, int device, void* handle, void** comm, void** device_comm);
  int (*accept)(void* listener, void** comm, void** device_comm);
  int (*register_memory)(void* comm, void* data, size_t size, int type, void** handle);
  int (*register_dma)(void* comm, void* data, size_t size, int type, uint64_t offset, int fd, void** handle);
  int (*deregister)(void* comm, void* handle);
  int (*send)(void* comm, void* data, size_t size, int tag, void* memory, void* parent, void** request);
  int (*receive)(void* comm, int n, void** data, size_t* sizes, int* tags, void** memory, void** parent,
                 void** request);
  int (*flush)(void* comm, int n, void** data, int* sizes, void** memory, void** request);
  int (*test)(void* request, int* done, int* sizes);
};

void check(int code, const char* call) {
  if (code != 0) fail(std::string("the plugin's ") + call + " returned " + std::to_string(code));
}

void log_warning(int level, unsigned long, const char*, int, const char* format, ...)
    __attribute__((format(printf, 5, 6)));

void log_warning(int level, unsigned long, const char*, int, const char* format, ...) {
  if (level != 2) return;
  va_list values;
  va_start(values, format);
  std::vfprintf(stderr, format, values);
  va_end(values);
  std::fputc('\n', stderr);
}

class PluginLink : public Link {
 public:
  explicit PluginLink(const char* library) {
    void* opened = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (opened == nullptr) fail(dlerror());
    table_ = static_cast<const Table*>(dlsym(opened, "ncclNetPlugin_v11"));
    if (table_ == nullptr) fail(dlerror());
    int traffic_class = -1;
    check(table_->init(&context_, 1, &traffic_class, reinterpret_cast<void*>(&log_warning), nullptr), "init");
    check(table_->listen(context_, 0, handle_.data(), &listener_), "listen");
  }
  std::string handle() override { return {handle_.data(), handle_.size()}; }
  void meet(const std::string& other) override {
    if (other.size() != kHandleBytes) fail("a handle of the plugin has 128 bytes");
    std::array<char, kHandleBytes> theirs;
    std::memcpy(theirs.data(), other.data(), kHandleBytes);
    while (sender_ == nullptr || receiver_ == nullptr) {
      void* none = nullptr;
      if (sender_ == nullptr) check(table_->connect(context_, 0, theirs.data(), &sender_, &none), "connect");
      if (receiver_ == nullptr) check(table_->accept(listener_, &receiver_, &none), "accept");
      sched_yield();
    }
  }
  void enroll(Slots& slots) override {
    check(table_->register_memory(sender_, slots.memory.data(), slots.memory.size(), 1, &slots.send_key), "regMr");
    check(table_->register_memory(receiver_, slots.memory.data(), slots.memory.size(), 1, &slots.receive_key), "regMr");
  }
  void dismiss(Slots& slots) override {
    check(table_->deregister(sender_, slots.send_key), "deregMr");
    check(table_->deregister(receiver_, slots.receive_key), "deregMr");
  }
  void send(Slots& slots, int count) override {
    drive(
        count, slots.count,
        [&](int message) {
          void*& request = requests_[static_cast<size_t>(message % kWindow)] = nullptr;
          check(table_->send(sender_, slots[message], slots.size, 0, slots.send_key, nullptr, &request), "isend");
          return request != nullptr;
        },
        [this](int message) { return test(message); });
  }
  void receive(Slots& slots, int count) override {
    drive(
        count, slots.count,
        [&](int message) {
          void*& request = requests_[static_cast<size_t>(message % kWindow)] = nullptr;
          void* data = slots[message];
          void* parent = nullptr;
          size_t size = slots.size;
          int tag = 0;
          check(table_->receive(receiver_, 1, &data, &size, &tag, &slots.receive_key, &parent, &request), "irecv");
          return request != nullptr;
        },
        [this](int message) { return test(message); });
  }

 private:
  bool test(int message) {
    int done = 0;
    int size = 0;
    check(table_->test(requests_[static_cast<size_t>(message % kWindow)], &done, &size), "test");
    return done != 0;
  }

  const Table* table_ = nullptr;
  void* context_ = nullptr;
  void* listener_ = nullptr;
  void* sender_ = nullptr;
  void* receiver_ = nullptr;
  std::array<void*, kWindow> requests_{};
  std::array<char, kHandleBytes> handle_{};
};

// ---- plain sockets

// A thread that runs one piece of work at a time.
class Worker {
 public:
  Worker() : thread_([this] { run(); }) {}
  ~Worker() {
    start(nullptr);
    thread_.join();
  }
  void start(std::function<void()> work) {
    const std::lock_guard<std::mutex> lock(mutex_);
    work_ = std::move(work);
    busy_ = true;
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return !busy_; });
  }

 private:
  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return busy_; });
      if (!work_) return;
      lock.unlock();
      work_();
      lock.lock();
      busy_ = false;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::function<void()> work_;
  bool busy_ = false;
  std::thread thread_;
};

int listen_at(const std::string& address, uint16_t* port) {
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST | AI_PASSIVE;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(address.c_str(), "0", &hints, &found) != 0) fail(address + " is no address");
  const int fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0 || bind(fd, found->ai_addr, found->ai_addrlen) != 0 || listen(fd, 64) != 0) fail_errno(address);
  freeaddrinfo(found);
  sockaddr_storage bound{};
  socklen_t length = sizeof bound;
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&bound), &length) != 0) fail_errno("getsockname");
  *port = ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&bound)->sin6_port
                                            : reinterpret_cast<sockaddr_in*>(&bound)->sin_port);
  return fd;
}

int connect_to(const std::string& address, const std::string& port) {
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(address.c_str(), port.c_str(), &hints, &found) != 0) fail(address + " is no address");
  const int fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0 || connect(fd, found->ai_addr, found->ai_addrlen) != 0) fail_errno("connect to " + address);
  freeaddrinfo(found);
  return fd;
}

void set_no_delay(int fd) {
  const int on = 1;
  if (setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) != 0) fail_errno("TCP_NODELAY");
}

// A connection that carries messages, each after its length.
class Stream {
 public:
  Stream(int fd, bool polls) : fd_(fd), flags_(polls ? MSG_DONTWAIT : 0) { set_no_delay(fd); }
  void send(const char* data, size_t size) {
    uint64_t length = size;
    std::array<iovec, 2> parts = {{{&length, sizeof length}, {const_cast<char*>(data), size}}};
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = parts.size();
    for (size_t left = sizeof length + size; left > 0;) {
      const ssize_t sent = sendmsg(fd_, &message, flags_ | MSG_NOSIGNAL);
      if (!moved(sent)) continue;
      left -= static_cast<size_t>(sent);
      advance(&message, static_cast<size_t>(sent));
    }
  }
  void receive(char* data, size_t size) {
    uint64_t length = 0;
    take(reinterpret_cast<char*>(&length), sizeof length);
    if (length != size) fail("a message of another size came");
    take(data, size);
  }

 private:
  // False: no bytes could be moved yet.
  bool moved(ssize_t result) {
    if (result > 0) return true;
    if (result == 0) fail("the other end has gone");
    if (errno != EAGAIN && errno != EINTR) fail_errno("the connection");
    sched_yield();
    return false;
  }
  static void advance(msghdr* message, size_t sent) {
    while (message->msg_iovlen > 0 && sent >= message->msg_iov->iov_len) {
      sent -= message->msg_iov->iov_len;
      ++message->msg_iov;
      --message->msg_iovlen;
    }
    if (message->msg_iovlen > 0) {
      message->msg_iov->iov_base = static_cast<char*>(message->msg_iov->iov_base) + sent;
      message->msg_iov->iov_len -= sent;
    }
  }
  void take(char* data, size_t size) {
    while (size > 0) {
      const ssize_t got = recv(fd_, data, size, flags_ != 0 ? flags_ : MSG_WAITALL);
      if (!moved(got)) continue;
      data += got;
      size -= static_cast<size_t>(got);
    }
  }

  const int fd_;
  const int flags_;
};

// Opens connections in both directions between two processes of this program, without NCCL.
class Meeting {
 public:
  explicit Meeting(std::string address) : address_(std::move(address)), listener_(listen_at(address_, &port_)) {}
  std::string handle() const { return address_ + " " + std::to_string(port_); }
  // Returns the descriptors to send on, and as many to receive on.
  std::array<std::vector<int>, 2> meet(const std::string& other, size_t streams) const {
    const size_t space = other.find(' ');
    if (space == other.npos) fail("not a handle of sockets");
    std::array<std::vector<int>, 2> out;
    // The other end's backlog takes the connections, so both ends may connect first and accept afterwards, in order.
    for (size_t i = 0; i < streams; ++i) {
      out[0].push_back(connect_to(other.substr(0, space), other.substr(space + 1)));
    }
    for (size_t i = 0; i < streams; ++i) {
      out[1].push_back(accept(listener_, nullptr, nullptr));
      if (out[1].back() < 0) fail_errno("accept");
    }
    return out;
  }

 private:
  const std::string address_;
  uint16_t port_ = 0;
  const int listener_;
};

// Behaves like NCCL's own sockets on machines without network cards of AWS or Google. All messages use one connection,
// and only test() of the oldest request moves bytes. A message is its length in 4 bytes, then the payload: up to 128
// bytes in the same call, otherwise in a call of its own. The receiver reads the length first, then the payload.
class NcclLink : public Link {
 public:
  explicit NcclLink(const std::string& address) : meeting_(address) {}
  std::string handle() override { return meeting_.handle(); }
  void meet(const std::string& other) override {
    const auto found = meeting_.meet(other, 1);
    sender_ = found[0].front();
    receiver_ = found[1].front();
    set_no_delay(sender_);
    set_no_delay(receiver_);
  }
  void send(Slots& slots, int count) override {
    run(slots, count, [this](Request& request) { return test_send(&request); });
  }
  void receive(Slots& slots, int count) override {
    run(slots, count, [this](Request& request) { return test_receive(&request); });
  }

 private:
  static constexpr size_t kInline = 128;
  struct Request {
    char* data;
    size_t size;
    size_t offset;
    bool announced;
  };

  template <typename Test>
  void run(Slots& slots, int count, const Test& test) {
    drive(
        count, slots.count,
        [&](int message) {
          requests_[static_cast<size_t>(message % kWindow)] = {slots[message], slots.size, 0, false};
          return true;
        },
        [&](int message) { return test(requests_[static_cast<size_t>(message % kWindow)]); });
  }
  bool test_send(Request* request) const {
    if (!request->announced) {
      std::array<char, sizeof(uint32_t) + kInline> first;
      const auto length = static_cast<uint32_t>(request->size);
      const size_t with = request->size <= kInline ? request->size : 0;
      std::memcpy(first.data(), &length, sizeof length);
      std::memcpy(first.data() + sizeof length, request->data, with);
      if (!begin(::send, sender_, first.data(), sizeof length + with)) return false;
      request->announced = true;
      request->offset = with;
    }
    return move(::send, sender_, request->data, request->size, &request->offset);
  }
  bool test_receive(Request* request) const {
    if (!request->announced) {
      uint32_t length = 0;
      if (!begin(::recv, receiver_, reinterpret_cast<char*>(&length), sizeof length)) return false;
      if (length != request->size) fail("a message of another size came");
      request->announced = true;
    }
    return move(::recv, receiver_, request->data, request->size, &request->offset);
  }
  // Moves all bytes or none: once it has begun, it waits for the rest. False if nothing could be moved.
  template <typename Call, typename Data>
  static bool begin(Call call, int fd, Data data, size_t size) {
    size_t offset = 0;
    do {
      move(call, fd, data, size, &offset);
    } while (offset > 0 && offset < size);
    return offset > 0;
  }
  // Moves bytes until all are moved or the kernel refuses. True if all are moved.
  template <typename Call, typename Data>
  static bool move(Call call, int fd, Data data, size_t size, size_t* offset) {
    while (*offset < size) {
      const ssize_t moved = call(fd, data + *offset, size - *offset, MSG_DONTWAIT | MSG_NOSIGNAL);
      if (moved == 0) fail("the other end has gone");
      if (moved < 0 && errno != EAGAIN && errno != EINTR) fail_errno("the connection");
      if (moved < 0) return false;
      *offset += static_cast<size_t>(moved);
    }
    return true;
  }

  const Meeting meeting_;
  int sender_ = -1;
  int receiver_ = -1;
  std::array<Request, kWindow> requests_{};
};

class SocketLink : public Link {
 public:
  SocketLink(std::string address, size_t streams, bool polls)
      : meeting_(std::move(address)), streams_(streams), polls_(polls), workers_(streams - 1) {}
  std::string handle() override { return meeting_.handle(); }
  void meet(const std::string& other) override {
    const auto [out, in] = meeting_.meet(other, streams_);
    for (const int fd : out) senders_.emplace_back(fd, polls_);
    for (const int fd : in) receivers_.emplace_back(fd, polls_);
  }
  void send(Slots& slots, int count) override {
    share(slots, [this, &slots, count](size_t part, size_t from, size_t size) {
      for (int i = 0; i < count; ++i) senders_[part].send(slots[i] + from, size);
    });
  }
  void receive(Slots& slots, int count) override {
    share(slots, [this, &slots, count](size_t part, size_t from, size_t size) {
      for (int i = 0; i < count; ++i) receivers_[part].receive(slots[i] + from, size);
    });
  }

 private:
  // Runs `work` on as many threads as make sense; each moves its share of every message.
  template <typename Work>
  void share(const Slots& slots, const Work& work) {
    const size_t size = slots.size;
    const size_t parts = std::clamp<size_t>(size / kSmallestShare, 1, streams_);
    const auto start = [&](size_t part) { return size * part / parts; };
    for (size_t part = 1; part < parts; ++part) {
      workers_[part - 1].start([=, &work] { work(part, start(part), start(part + 1) - start(part)); });
    }
    work(0, 0, start(1));
    for (size_t part = 1; part < parts; ++part) workers_[part - 1].wait();
  }

  const Meeting meeting_;
  const size_t streams_;
  const bool polls_;
  std::vector<Stream> senders_;
  std::vector<Stream> receivers_;
  std::vector<Worker> workers_;
};

// ---- measuring

std::string to_hex(const std::string& bytes) {
  std::string out;
  for (const unsigned char byte : bytes) {
    out += "0123456789abcdef"[byte >> 4];
    out += "0123456789abcdef"[byte & 15];
  }
  return out;
}

std::string from_hex(const std::string& text) {
  std::string out;
  for (size_t i = 0; i + 1 < text.size(); i += 2) {
    out += static_cast<char>(std::strtol(text.substr(i, 2).c_str(), nullptr, 16));
  }
  return out;
}

// Sends `count` messages and waits for an answer after the last; or makes `count` round trips.
void carry_out(Link& link, bool begins, bool pings, Slots& slots, Slots& answer, int count) {
  if (!pings) {
    begins ? link.send(slots, count) : link.receive(slots, count);
    begins ? link.receive(answer, 1) : link.send(answer, 1);
    return;
  }
  for (int i = 0; i < count; ++i) {
    begins ? link.send(slots, 1) : link.receive(slots, 1);
    begins ? link.receive(slots, 1) : link.send(slots, 1);
  }
}

void serve(Link& link) {
  std::unique_ptr<Slots> slots;
  Slots answer(kAnswerBytes);
  link.enroll(answer);
  std::string line;
  while (std::getline(std::cin, line)) {
    std::istringstream words(line);
    std::string role, pattern;
    size_t size = 0;
    int count = 0;
    if (!(words >> role >> pattern >> size >> count)) fail("not a command: " + line);
    if (slots == nullptr || slots->size != size) {
      if (slots != nullptr) link.dismiss(*slots);
      slots = std::make_unique<Slots>(size);
      link.enroll(*slots);
    }
    const int64_t started = now_ns();
    carry_out(link, role == "send", pattern == "ping", *slots, answer, count);
    std::cout << now_ns() - started << std::endl;
  }
}

std::unique_ptr<Link> make(int argc, char** argv) {
  const std::string kind = argc > 2 ? argv[1] : "";
  if (kind == "plugin" && argc == 3) return std::make_unique<PluginLink>(argv[2]);
  if (kind == "nccl" && argc == 3) return std::make_unique<NcclLink>(argv[2]);
  if (kind == "polling" && argc == 3) return std::make_unique<SocketLink>(argv[2], 1, true);
  if (kind == "sockets" && argc == 4 && std::atoi(argv[3]) > 0) {
    return std::make_unique<SocketLink>(argv[2], static_cast<size_t>(std::atoi(argv[3])), false);
  }
  std::fprintf(stderr, "usage: net_bench plugin LIBRARY | sockets ADDRESS N | nccl ADDRESS | polling ADDRESS\n");
  std::exit(2);
}

}  // namespace

int main(int argc, char** argv) {
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  const std::unique_ptr<Link> link = make(argc, argv);
  std::cout << "handle " << to_hex(link->handle()) << std::endl;
  std::string line;
  if (!std::getline(std::cin, line)) return 0;
  link->meet(from_hex(line));
  std::cout << "ready" << std::endl;
  serve(*link);
  return 0;
}
