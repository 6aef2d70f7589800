// The TCP port of one job on this host. Its address stays while generations come and go; connections that come between
// two of them wait in the kernel.
//
// Thread safety: open() and close() belong to the owner; the rest from any thread between them.
#pragma once

#include <string>

#include "base/status.h"
#include "engine/values/options.h"
#include "net/socket.h"

namespace bagua {

class Listener {
 public:
  // Binds the port, and checks before any connection comes that encryption will work. Harmless when it is open.
  Status open(const EngineOptions& options);
  void close() { socket_.reset(); }

  int fd() const { return socket_.get(); }
  const std::string& address() const { return address_; }  // empty until open()

 private:
  Status check_encryption(Encryption encryption) const;

  Fd socket_;
  std::string address_;
};

}  // namespace bagua
