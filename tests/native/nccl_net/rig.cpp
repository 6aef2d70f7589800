#include "rig.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <mutex>
#include <thread>

#include "base/clock.h"

namespace bagua::nccl_net::rig {
namespace {

std::mutex mutex;
std::vector<std::string> lines;  // mutex
const NetV11* other = nullptr;

void logger(LogLevel level, unsigned long, const char* file, int line, const char* format, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  if (std::getenv("NCCL_DEBUG") != nullptr) std::fprintf(stderr, "%s:%d %s\n", file, line, text);
  if (level != kLogWarn) return;
  const std::lock_guard<std::mutex> lock(mutex);
  lines.emplace_back(text);
}

size_t entries(const char* folder) {
  size_t count = 0;
  for ([[maybe_unused]] const auto& item : std::filesystem::directory_iterator(folder)) ++count;
  return count;
}

}  // namespace

const NetV11& net() {
  static const bool ready = [] {
    ::setenv("NCCL_SOCKET_IFNAME", "lo", 0);
    void* context = nullptr;
    return ncclNetPlugin_v11.init(&context, 1, nullptr, logger, nullptr) == kSuccess;
  }();
  CHECK(ready);
  return other != nullptr ? *other : ncclNetPlugin_v11;
}

void use(const NetV11* table) {
  net();
  other = table;
}

void meet(void* handle, Pair* pair, int seconds) {
  const int64_t deadline = now_ns() + seconds * kNsPerS;
  while (pair->sender == nullptr || pair->receiver == nullptr) {
    if (pair->sender == nullptr) CHECK_EQ(net().connect(nullptr, 0, handle, &pair->sender, nullptr), kSuccess);
    if (pair->receiver == nullptr) CHECK_EQ(net().accept(pair->listener, &pair->receiver, nullptr), kSuccess);
    CHECK(now_ns() < deadline);
    std::this_thread::yield();
  }
}

Pair connected() {
  Pair pair;
  char handle[kHandleBytes];
  CHECK_EQ(net().listen(nullptr, 0, handle, &pair.listener), kSuccess);
  meet(handle, &pair);
  return pair;
}

void close(Pair* pair) {
  if (pair->sender != nullptr) CHECK_EQ(net().close_send(pair->sender), kSuccess);
  if (pair->receiver != nullptr) CHECK_EQ(net().close_recv(pair->receiver), kSuccess);
  if (pair->listener != nullptr) CHECK_EQ(net().close_listen(pair->listener), kSuccess);
  *pair = {};
}

std::vector<uint8_t> pattern(size_t size, uint64_t seed) {
  std::vector<uint8_t> out(size);
  uint64_t state = seed * 0x9e3779b97f4a7c15 + 1;
  for (uint8_t& byte : out) {
    state = state * 6364136223846793005 + 1442695040888963407;
    byte = static_cast<uint8_t>(state >> 56);
  }
  return out;
}

Result finish(void* request, int* size, int seconds) {
  const int64_t deadline = now_ns() + seconds * kNsPerS;
  for (;;) {
    int done = 0;
    const Result result = net().test(request, &done, size);
    if (result != kSuccess || done != 0) return result;
    CHECK(now_ns() < deadline);
    std::this_thread::yield();
  }
}

void* send(const Pair& pair, const void* data, size_t size) {
  void* request = nullptr;
  CHECK_EQ(net().isend(pair.sender, const_cast<void*>(data), size, 0, nullptr, nullptr, &request), kSuccess);
  CHECK(request != nullptr);
  return request;
}

void* receive(const Pair& pair, void* data, size_t size) {
  void* request = nullptr;
  int tag = 0;
  CHECK_EQ(net().irecv(pair.receiver, 1, &data, &size, &tag, nullptr, nullptr, &request), kSuccess);
  CHECK(request != nullptr);
  return request;
}

std::vector<std::string> warnings() {
  const std::lock_guard<std::mutex> lock(mutex);
  std::vector<std::string> out;
  out.swap(lines);
  return out;
}

size_t open_descriptors() {
  return entries("/proc/self/fd");
}

size_t thread_count() {
  return entries("/proc/self/task");
}

}  // namespace bagua::nccl_net::rig
