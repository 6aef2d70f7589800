// Messages of the hosts of one communicator to each other beside the data. fields(): what goes over the wire, in this
// order; a text comes last.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <variant>
#include <vector>

#include "channel/layout.h"

namespace bagua {

namespace message {

// The operation that this host's ranks called as collective `sequence`.
struct Describe {
  int32_t rank = -1;  // one of them, global
  uint64_t sequence = 0;
  uint64_t members = 0;      // digest of the communicator's members
  uint32_t chunk_bytes = 0;  // of this host
  uint32_t ring = 0;         // digest of the ring's order
  Descriptor descriptor{};
  auto fields() { return std::tie(rank, sequence, members, chunk_bytes, ring, descriptor); }
};

// The next recv of this source, destination and tag is posted.
struct Ready {
  int32_t rank = -1;                     // that posted it, global
  uint32_t source = 0, destination = 0;  // indices in the communicator
  uint64_t message = 0;                  // under which its bytes are to come
  Descriptor descriptor{};
  auto fields() { return std::tie(rank, source, destination, message, descriptor); }
};

// `destination` receives from any source: from now on tell of sends to it with this tag.
struct Seek {
  uint32_t destination = 0;  // index in the communicator
  uint32_t tag = 0;
  auto fields() { return std::tie(destination, tag); }
};

// `sends` sends of this source, destination and tag were called, of those for which no recv was posted when the
// destination sought; the last is not begun.
struct Offer {
  uint32_t source = 0, destination = 0;  // indices in the communicator
  uint32_t tag = 0;
  uint64_t sends = 0;
  auto fields() { return std::tie(source, destination, tag, sends); }
};

// A rank will send or receive nothing more.
struct Left {
  int32_t rank = -1;   // global
  uint64_t sends = 0;  // to ranks of the host that hears it, so far
  std::string how;
  auto fields() { return std::tie(rank, sends, how); }
};

// The generation has failed there.
struct Failed {
  std::string why;
  auto fields() { return std::tie(why); }
};

// The generation is suspended there: it has lost somebody, or the next one begins.
struct Suspended {
  int32_t member = -1;
  int32_t host = -1;
  uint32_t next = 0;  // 1: the next one begins, and this one has lost nobody
  std::string why;
  auto fields() { return std::tie(member, host, next, why); }
};

// In good order, nothing more is begun there.
struct Close {
  uint64_t done = 0;  // collectives
  std::string why;
  auto fields() { return std::tie(done, why); }
};

// Answer: all these are done here, too, and nothing else needs you.
struct Closed {
  auto fields() { return std::tie(); }
};

// The order of the ring, see ring_survey.h. Hosts are named by their index in the communicator.

// To host 0: every host is connected here.
struct Connected {
  auto fields() { return std::tie(); }
};

// From host 0: measure what you can send to `host`.
struct Measure {
  uint32_t host = 0;
  auto fields() { return std::tie(host); }
};

// Bytes come as data, a measurement: say when they are there.
struct Probe {
  uint32_t bytes = 0;
  uint64_t number = 0;
  auto fields() { return std::tie(bytes, number); }
};

// The bytes of that probe are there.
struct Probed {
  uint64_t number = 0;
  auto fields() { return std::tie(number); }
};

// To host 0: this host can send that much to `host`.
struct Measured {
  uint32_t host = 0;
  uint64_t bytes_per_s = 0;
  auto fields() { return std::tie(host, bytes_per_s); }
};

// From host 0: the order, and the text that tells of it.
struct RingOrder {
  std::vector<int> order;
  std::string text;
  auto fields() { return std::tie(order, text); }
};

}  // namespace message

// Their numbers on the wire are their places here.
using Control = std::variant<message::Describe, message::Ready, message::Left, message::Failed, message::Close,
                             message::Closed, message::Connected, message::Measure, message::Probe, message::Probed,
                             message::Measured, message::RingOrder, message::Suspended, message::Seek, message::Offer>;

// Too long a text is cut.
std::string encode(Control control);
// False if it can't be one of ours.
bool decode(const std::string& bytes, Control* control);

// Functions for std::visit(), one for each kind of message.
template <class... Functions>
struct ByMessage : Functions... {
  using Functions::operator()...;
};
template <class... Functions>
ByMessage(Functions...) -> ByMessage<Functions...>;

}  // namespace bagua
