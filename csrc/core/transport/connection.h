// A connection between two hosts after its handshake: the socket and, if it is encrypted, the ciphers.
#pragma once

#include <utility>

#include "net/socket.h"
#include "transport/seal.h"

namespace bagua {

struct Connection {
  Connection() = default;
  Connection(Fd plain) : socket(std::move(plain)) {}  // not explicit: a plain socket converts to a plain connection
  Connection(Fd connected, Seals agreed) : socket(std::move(connected)), seals(std::move(agreed)) {}

  bool encrypted() const { return seals.out != nullptr; }

  Fd socket;
  Seals seals;
};

}  // namespace bagua
