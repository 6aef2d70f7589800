// The listening end: accepts sockets, reads their Hello, and groups those of one connection. A socket without the nonce
// is dropped and disturbs no other. One thread at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "nccl_net/devices.h"
#include "nccl_net/receive.h"
#include "nccl_net/wire.h"
#include "net/socket.h"

namespace bagua::nccl_net {

class Listener {
 public:
  static Status open(const Device& device, Handle* handle, std::unique_ptr<Listener>* out);

  // Goes on without waiting. *out stays empty until a connection is complete; an error is one of this machine.
  Status accept(std::unique_ptr<ReceiveConnection>* out);

 private:
  static constexpr size_t kMaxStrangers = 64;  // the oldest is dropped for the next

  // A socket whose Hello is not complete.
  struct Stranger {
    Socket socket;
    std::string peer;
    int64_t deadline_ns;
    size_t got = 0;
    Hello hello{};
  };
  // Sockets of one connection, until all have come.
  struct Group {
    Nonce connection;
    std::string peer;
    int64_t deadline_ns;
    size_t present = 0;
    std::vector<Socket> sockets;
  };

  Status take_new();
  // Reads what has come. False if the socket is to be dropped or has been put into its group.
  bool read_hello(Stranger* stranger);
  void admit(Stranger* stranger);
  void drop(const Stranger& stranger, const std::string& reason);
  void drop_late();

  Socket socket_;
  Nonce nonce_;
  std::vector<Stranger> strangers_;
  std::vector<Group> groups_;
  uint64_t dropped_ = 0;
};

}  // namespace bagua::nccl_net
