#include "engine/remote/control.h"

#include <cstring>
#include <sstream>
#include <utility>

#include "transport/mesh.h"

namespace bagua {

namespace {

// All messages have the same form on the wire, which ends with a text; `number`, `a` and `b` have a meaning of their
// own in each.
struct Fixed {
  uint32_t type;
  int32_t rank;
  uint64_t number;
  uint32_t a, b;
  uint64_t members;  // of Seek and Offer: the tag
  Descriptor descriptor;
};
static_assert(sizeof(Fixed) == 192, "part of the wire format");

struct Wire {
  Fixed fixed{};
  std::string text;
};

void to_wire(const message::Describe& m, Wire* w) {
  w->fixed = {0, m.rank, m.sequence, m.chunk_bytes, m.ring, m.members, m.descriptor};
}

void from_wire(const Wire& w, message::Describe* m) {
  const Fixed& f = w.fixed;
  *m = {f.rank, f.number, f.members, f.a, f.b, f.descriptor};
}

void to_wire(const message::Ready& m, Wire* w) {
  w->fixed = {0, m.rank, m.message, m.source, m.destination, 0, m.descriptor};
}

void from_wire(const Wire& w, message::Ready* m) {
  const Fixed& f = w.fixed;
  *m = {f.rank, f.a, f.b, f.number, f.descriptor};
}

void to_wire(const message::Left& m, Wire* w) {
  w->fixed.rank = m.rank;
  w->fixed.number = m.sends;
  w->text = m.how;
}

void from_wire(const Wire& w, message::Left* m) {
  *m = {w.fixed.rank, w.fixed.number, w.text};
}

void to_wire(const message::Failed& m, Wire* w) {
  w->text = m.why;
}

void from_wire(const Wire& w, message::Failed* m) {
  m->why = w.text;
}

void to_wire(const message::Close& m, Wire* w) {
  w->fixed.number = m.done;
  w->text = m.why;
}

void from_wire(const Wire& w, message::Close* m) {
  *m = {w.fixed.number, w.text};
}

void to_wire(const message::Closed&, Wire*) {}
void from_wire(const Wire&, message::Closed*) {}
void to_wire(const message::Connected&, Wire*) {}
void from_wire(const Wire&, message::Connected*) {}

void to_wire(const message::Measure& m, Wire* w) {
  w->fixed.a = m.host;
}

void from_wire(const Wire& w, message::Measure* m) {
  m->host = w.fixed.a;
}

void to_wire(const message::Probe& m, Wire* w) {
  w->fixed.a = m.bytes;
  w->fixed.number = m.number;
}

void from_wire(const Wire& w, message::Probe* m) {
  *m = {w.fixed.a, w.fixed.number};
}

void to_wire(const message::Probed& m, Wire* w) {
  w->fixed.number = m.number;
}

void from_wire(const Wire& w, message::Probed* m) {
  m->number = w.fixed.number;
}

void to_wire(const message::Measured& m, Wire* w) {
  w->fixed.a = m.host;
  w->fixed.number = m.bytes_per_s;
}

void from_wire(const Wire& w, message::Measured* m) {
  *m = {w.fixed.a, w.fixed.number};
}

// The order stands in the first line of the text.
void to_wire(const message::RingOrder& m, Wire* w) {
  for (const int host : m.order) w->text += (w->text.empty() ? "" : " ") + std::to_string(host);
  w->text += "\n" + m.text;
}

void from_wire(const Wire& w, message::RingOrder* m) {
  const size_t end = w.text.find('\n');
  std::istringstream list(w.text.substr(0, end));
  for (int host = 0; list >> host;) m->order.push_back(host);
  if (end != std::string::npos) m->text = w.text.substr(end + 1);
}

void to_wire(const message::Suspended& m, Wire* w) {
  w->fixed.rank = m.member;
  w->fixed.number = static_cast<uint64_t>(int64_t{m.host});
  w->fixed.a = m.next;
  w->text = m.why;
}

void from_wire(const Wire& w, message::Suspended* m) {
  *m = {w.fixed.rank, static_cast<int32_t>(static_cast<int64_t>(w.fixed.number)), w.fixed.a, w.text};
}

void to_wire(const message::Seek& m, Wire* w) {
  w->fixed.b = m.destination;
  w->fixed.members = m.tag;
}

void from_wire(const Wire& w, message::Seek* m) {
  *m = {w.fixed.b, static_cast<uint32_t>(w.fixed.members)};
}

void to_wire(const message::Offer& m, Wire* w) {
  w->fixed = {0, 0, m.sends, m.source, m.destination, m.tag, {}};
}

void from_wire(const Wire& w, message::Offer* m) {
  const Fixed& f = w.fixed;
  *m = {f.a, f.b, static_cast<uint32_t>(f.members), f.number};
}

template <size_t kIndex = 0>
bool read_nth(size_t index, const Wire& wire, Control* control) {
  if constexpr (kIndex < std::variant_size_v<Control>) {
    if (index != kIndex) return read_nth<kIndex + 1>(index, wire, control);
    from_wire(wire, &control->emplace<kIndex>());
    return true;
  } else {
    return false;
  }
}

}  // namespace

std::string encode(const Control& control) {
  Wire wire;
  std::visit([&wire](const auto& message) { to_wire(message, &wire); }, control);
  wire.fixed.type = static_cast<uint32_t>(control.index() + 1);
  std::string bytes(sizeof wire.fixed, '\0');
  memcpy(bytes.data(), &wire.fixed, sizeof wire.fixed);
  return bytes + wire.text.substr(0, Mesh::kMaxControl - sizeof wire.fixed);
}

bool decode(const std::string& bytes, Control* control) {
  Wire wire;
  if (bytes.size() < sizeof wire.fixed) return false;
  memcpy(&wire.fixed, bytes.data(), sizeof wire.fixed);
  if (wire.fixed.type < 1 || !kind_known(wire.fixed.descriptor.kind)) return false;
  wire.text = bytes.substr(sizeof wire.fixed);
  return read_nth(wire.fixed.type - 1, wire, control);
}

}  // namespace bagua
