#include "engine/control.h"

#include <cstring>

#include "transport/mesh.h"

namespace bagua {

namespace {

struct Fixed {
  uint32_t type;
  int32_t rank;
  uint64_t sequence;
  uint32_t source, destination;
  uint64_t members;
  Descriptor descriptor;
};
static_assert(sizeof(Fixed) == 192, "part of the wire format");

}  // namespace

std::string encode(const Control& control) {
  const Fixed fixed{static_cast<uint32_t>(control.type),
                    control.rank,
                    control.sequence,
                    control.source,
                    control.destination,
                    control.members,
                    control.descriptor};
  std::string bytes(sizeof fixed, '\0');
  memcpy(bytes.data(), &fixed, sizeof fixed);
  return bytes + control.text.substr(0, Mesh::kMaxControl - sizeof fixed);
}

bool decode(const std::string& bytes, Control* control) {
  Fixed fixed;
  if (bytes.size() < sizeof fixed) return false;
  memcpy(&fixed, bytes.data(), sizeof fixed);
  if (fixed.type < 1 || fixed.type > static_cast<uint32_t>(Control::Type::kRing) || !kind_known(fixed.descriptor.kind))
    return false;
  control->type = static_cast<Control::Type>(fixed.type);
  control->rank = fixed.rank;
  control->sequence = fixed.sequence;
  control->source = fixed.source;
  control->destination = fixed.destination;
  control->members = fixed.members;
  control->descriptor = fixed.descriptor;
  control->text = bytes.substr(sizeof fixed);
  return true;
}

}  // namespace bagua
