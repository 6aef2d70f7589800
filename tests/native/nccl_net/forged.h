// Senders made by hand: what goes over the wire is up to the test.
#pragma once

#include <arpa/inet.h>
#include <sys/socket.h>

#include <cstring>
#include <string>
#include <thread>

#include "base/clock.h"
#include "nccl_net/wire.h"
#include "net/socket.h"
#include "rig.h"

namespace bagua::nccl_net::rig {

// A plain connection to a listener of the plugin.
inline Fd dial(const Handle& handle) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(handle.port);
  std::memcpy(&address.sin_addr, handle.address, sizeof address.sin_addr);
  Fd out(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  CHECK(::connect(out.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0);
  return out;
}

inline void put(const Fd& socket, const void* data, size_t size) {
  CHECK_EQ(::send(socket.get(), data, size, MSG_NOSIGNAL), static_cast<ssize_t>(size));
}

inline Hello greeting(const Handle& handle, uint16_t streams, uint16_t index) {
  Hello hello{};
  hello.magic = Hello::kMagic;
  hello.version = kProtocolVersion;
  hello.streams = streams;
  hello.nonce = handle.nonce;
  hello.index = index;
  return hello;
}

// A receiver whose sender is made by hand: control and one data socket.
struct Forged {
  void* listener = nullptr;
  void* receiver = nullptr;
  Fd control;
  Fd data;

  Forged() {
    Handle handle;
    CHECK_EQ(net().listen(nullptr, 0, &handle, &listener), kSuccess);
    control = dial(handle);
    data = dial(handle);
    const Hello first = greeting(handle, 1, 0);
    const Hello second = greeting(handle, 1, 1);
    put(control, &first, sizeof first);
    put(data, &second, sizeof second);
    const int64_t deadline = now_ns() + 30 * kNsPerS;
    while (receiver == nullptr) {
      CHECK_EQ(net().accept(listener, &receiver, nullptr), kSuccess);
      CHECK(now_ns() < deadline);
      std::this_thread::yield();
    }
  }
  ~Forged() {
    net().close_recv(receiver);
    net().close_listen(listener);
  }
  void* receive(void* buffer, size_t size) const { return rig::receive({nullptr, nullptr, receiver}, buffer, size); }
};

// The header of a small message.
inline std::string small_header(uint64_t message, uint64_t total) {
  const SmallHeader header{SmallHeader::kMark | static_cast<uint32_t>(total), static_cast<uint32_t>(message)};
  std::string out(small_header_bytes(total), '\0');
  std::memcpy(out.data(), &header, sizeof header);
  return out;
}

inline void put(const Fd& socket, const std::string& bytes) {
  put(socket, bytes.data(), bytes.size());
}

inline bool warned_of(const std::string& part) {
  bool found = false;
  for (const std::string& line : warnings()) found = found || line.find(part) != std::string::npos;
  return found;
}

}  // namespace bagua::nccl_net::rig
