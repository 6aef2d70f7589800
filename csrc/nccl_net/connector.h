// The connecting end: opens all sockets of a connection, sends Hello and reads the Answer, in steps that never block.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "nccl_net/devices.h"
#include "nccl_net/send.h"
#include "nccl_net/wire.h"
#include "net/socket.h"

namespace bagua::nccl_net {

// Reads the address in a handle, for use through `device`. kInvalid: the bytes are no handle of this plugin.
Status handle_address(const Handle& handle, const Device& device, Address* out);

class Connector {
 public:
  Connector(const Handle& handle, const Address& address);

  // Makes progress. *out stays empty until the peer has accepted. An error is final.
  Status step(std::unique_ptr<SendConnection>* out);
  bool is_for(const Handle& handle) const { return handle_.nonce.equals(handle.nonce); }
  int64_t stepped_ns() const { return stepped_ns_; }

 private:
  enum class Stage { kClosed, kConnecting, kGreeting, kGreeted };
  struct Pending {
    Fd socket;
    Stage stage = Stage::kClosed;
    size_t sent = 0;  // bytes of the Hello
  };

  // Each returns an errno value; 0: go on.
  int begin();
  int advance(size_t index);
  int greet(size_t index);
  int read_answer(bool* answered, Status* answer);
  Status retry(int error);

  Handle handle_;
  Address address_;
  Nonce connection_{};
  std::vector<Pending> sockets_;
  Answer answer_{};
  size_t answer_got_ = 0;
  int64_t stepped_ns_ = 0;
  int64_t attempt_ns_ = 0;         // when this attempt began
  int64_t failing_since_ns_ = -1;  // when the first attempt that failed began
  int64_t next_try_ns_ = 0;
  int64_t pause_ns_;
};

}  // namespace bagua::nccl_net
