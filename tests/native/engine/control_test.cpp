// Messages between hosts beside the data, and bytes that are no message.
#include "engine/remote/control.h"

#include <cstring>
#include <string>
#include <variant>

#include "harness.h"
#include "transport/mesh.h"

namespace bagua {
namespace {

// Sends it and takes it back.
template <class Message>
Message there_and_back(const Message& message) {
  Control control;
  CHECK(decode(encode(message), &control));
  CHECK(std::holds_alternative<Message>(control));
  return std::get<Message>(control);
}

}  // namespace

TEST(every_field_arrives) {
  Descriptor descriptor{};
  descriptor.count = 77;
  const auto describe = there_and_back(message::Describe{1, 2, 3, 4, 5, descriptor});
  EXPECT(describe.rank == 1 && describe.sequence == 2 && describe.members == 3 && describe.chunk_bytes == 4 &&
         describe.ring == 5 && describe.descriptor.count == 77);
  const auto ready = there_and_back(message::Ready{1, 2, 3, 4, descriptor});
  EXPECT(ready.rank == 1 && ready.source == 2 && ready.destination == 3 && ready.message == 4 &&
         ready.descriptor.count == 77);
  const auto left = there_and_back(message::Left{1, 2, "has left"});
  EXPECT(left.rank == 1 && left.sends == 2 && left.how == "has left");
  EXPECT_EQ(there_and_back(message::Failed{"why"}).why, std::string("why"));
  const auto suspended = there_and_back(message::Suspended{3, -1, 1, "why"});
  EXPECT(suspended.member == 3 && suspended.host == -1 && suspended.why == "why");
  const auto seek = there_and_back(message::Seek{1, 0x80000002});
  EXPECT(seek.destination == 1 && seek.tag == 0x80000002);
  const auto offer = there_and_back(message::Offer{1, 2, 0x80000003, 4});
  EXPECT(offer.source == 1 && offer.destination == 2 && offer.tag == 0x80000003 && offer.sends == 4);
  const auto close = there_and_back(message::Close{7, ""});
  EXPECT(close.done == 7 && close.why.empty());
  there_and_back(message::Closed{});
  there_and_back(message::Connected{});
  EXPECT_EQ(there_and_back(message::Measure{9}).host, 9u);
  const auto probe = there_and_back(message::Probe{1, 2});
  EXPECT(probe.bytes == 1 && probe.number == 2);
  EXPECT_EQ(there_and_back(message::Probed{3}).number, uint64_t{3});
  const auto measured = there_and_back(message::Measured{1, 2});
  EXPECT(measured.host == 1 && measured.bytes_per_s == 2);
  const auto ring = there_and_back(message::RingOrder{{1, 0}, "two\nlines"});
  EXPECT(ring.order == (std::vector<int>{1, 0}) && ring.text == "two\nlines");
}

TEST(bytes_that_are_no_message) {
  Control control;
  EXPECT(!decode("", &control));
  std::string bytes = encode(message::Closed{});
  EXPECT(!decode(bytes + "x", &control));
  for (const uint32_t type : {15u, UINT32_MAX}) {
    memcpy(bytes.data(), &type, sizeof type);
    EXPECT(!decode(bytes, &control));
  }
  for (const Control& whole : {Control(message::Describe{}), Control(message::RingOrder{{1, 0}, ""})}) {
    bytes = encode(whole);
    EXPECT(decode(bytes, &control));
    for (size_t length = 0; length < bytes.size(); ++length) EXPECT(!decode(bytes.substr(0, length), &control));
  }
  Descriptor descriptor{};
  descriptor.kind = 200;
  EXPECT(!decode(encode(message::Ready{0, 0, 0, 0, descriptor}), &control));
  EXPECT_EQ(encode(message::Failed{std::string(2 * Mesh::kMaxControl, 'x')}).size(), Mesh::kMaxControl);
}

}  // namespace bagua
