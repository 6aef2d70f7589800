// The listening end: accepts sockets, reads their Hello, and groups the sockets of one connection. A socket without the
// right nonce is dropped; it does not disturb others. One thread at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/scarcity.h"
#include "nccl_net/devices.h"
#include "nccl_net/receive.h"
#include "nccl_net/wire.h"
#include "net/socket.h"

namespace bagua::nccl_net {

class Listener {
 public:
  static Status open(const Device& device, Handle* handle, std::unique_ptr<Listener>* out);

  // Makes progress without waiting. *out stays empty until a connection is complete. Errors are of this machine.
  Status accept(std::unique_ptr<ReceiveConnection>* out);

 private:
  static constexpr size_t kMaxStrangers = 64;  // at most; for a new one the oldest of the crowd is dropped

  // An accepted socket whose Hello is not complete yet.
  struct Stranger {
    Fd socket;
    std::string peer;
    int64_t deadline_ns;
    size_t got = 0;
    Hello hello{};
  };
  // The sockets of one connection, until all are there.
  struct Group {
    Nonce connection;
    std::string peer;
    int64_t deadline_ns;
    size_t present = 0;
    std::vector<Fd> sockets;
  };

  Status take_new();
  Status wait_for_descriptors(const Status& why);
  // Reads the Hello. False: drop the socket, or it has moved to its group.
  bool read_hello(Stranger* stranger);
  void admit(Stranger* stranger);
  void drop(const Stranger& stranger, const std::string& reason);
  void drop_late();

  Fd socket_;
  Nonce nonce_;
  std::vector<Stranger> strangers_;
  std::vector<Group> groups_;
  AcceptPause pause_;
  int64_t lacking_since_ns_ = -1;  // since when no descriptor is left; -1: there are some
  uint64_t dropped_ = 0;
};

}  // namespace bagua::nccl_net
