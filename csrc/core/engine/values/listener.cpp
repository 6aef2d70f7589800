#include "engine/values/listener.h"

#include "transport/handshake.h"
#include "transport/libcrypto.h"

namespace bagua {

Status Listener::open(const EngineOptions& options) {
  if (socket_.valid()) return Status::ok();
  if (Status status = listen_tcp(options.listen, &socket_, &address_); !status) return status;
  return check_encryption(options.credentials.encryption);
}

Status Listener::check_encryption(Encryption encryption) const {
  if (encryption == Encryption::kNever) return Status::ok();
  if (encryption == Encryption::kBeyondLoopback && listens_on_host(socket_.get())) return Status::ok();
  return KeyExchange().open();
}

}  // namespace bagua
