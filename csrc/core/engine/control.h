// What the hosts of one communicator tell each other beside the data.
#pragma once

#include <cstdint>
#include <string>

#include "channel/layout.h"

namespace bagua {

struct Control {
  enum class Type : uint32_t {
    kDescribe = 1,  // what this host's ranks called as collective `sequence`: descriptor, rank, members; source: bytes
                    // of a chunk; destination: digest of the ring's order
    kReady = 2,     // the recv number `sequence` from `source` at `destination` is posted: descriptor, rank
    kLeft = 3,      // rank `rank` will send or receive nothing more; sequence: sends to this host so far; text: why
    kError = 4,     // the engine there has failed: text
    kClose = 5,     // in good order, nothing more is begun there; sequence: collectives that are done; text: why
    kClosed = 6,    // answer: all these are done here, too, and nothing else needs you
    // The order of the ring, see ring_survey.h. Hosts are named by their index in the communicator.
    kConnected = 7,  // to host 0: every host is connected here
    kMeasure = 8,    // from host 0: measure what you can send to host `source`
    kProbe = 9,      // `source` bytes come as data, a measurement: say when they are there; sequence: its number
    kProbed = 10,    // they are there; sequence: as above
    kMeasured = 11,  // to host 0: this host can send `sequence` bytes per second to host `source`
    kRing = 12,      // from host 0: the order; text: indices, and after a line break what is to be told about it
  };
  Type type = Type::kError;
  int32_t rank = -1;  // global
  uint64_t sequence = 0;
  uint32_t source = 0;  // indices in the communicator
  uint32_t destination = 0;
  uint64_t members = 0;  // digest of the communicator's members
  Descriptor descriptor{};
  std::string text;
};

// Little-endian, as every platform of the core is.
std::string encode(const Control& control);
// False if it can't be one of ours.
bool decode(const std::string& bytes, Control* control);

}  // namespace bagua
