// The mesh when things go wrong: lost peers, damaged and foreign frames, wrong lengths, callers' mistakes.
#include <sys/socket.h>

#include <atomic>
#include <cstring>

#include "mesh_rig.h"

namespace bagua {
namespace {

using test::collect;
using test::collect_error;
using test::has;
using test::in_ms;
using test::pattern;
using test::RawPeer;
using Event = Mesh::Event;

TEST(what_arrived_comes_before_the_loss) {
  RawPeer peer(2, true);
  std::vector<std::string> in(5, std::string(70'000, '\0'));
  for (size_t i = 0; i < 5; ++i) peer.mesh.recv(1, 1, i, in[i].data(), in[i].size(), i);
  for (size_t i = 0; i < 4; ++i) peer.send(i % 2, 1, i, pattern(70'000, static_cast<unsigned>(i)));
  peer.write_frame(2, peer.header(2, FrameType::kControl, 0, 0, "last words"), "last words");
  peer.ends.clear();
  const Status status = peer.error();
  EXPECT_EQ(peer.done.size(), 5u);
  for (size_t i = 0; i < 4; ++i) EXPECT(in[i] == pattern(70'000, static_cast<unsigned>(i)));
  EXPECT(status.code() == Code::kUnavailable);
  has(status, "lost host 1: it closed the connection");
  peer.done.clear();
  has(peer.poll(1000), "lost host 1");  // the error is final
  EXPECT(peer.done.empty());
}

TEST(parked_frames_outlive_their_sender) {
  RawPeer peer(1);
  peer.send(0, 1, 1, "first");
  peer.send(0, 1, 2, "second");
  CHECK_OK(peer.poll(20));
  peer.ends.clear();
  CHECK_OK(peer.poll(400));  // nobody waits for anything that can't come
  std::string first(5, '\0');
  std::string second(6, '\0');
  peer.mesh.recv(1, 1, 1, first.data(), 5, 1);
  CHECK_OK(peer.await(1));
  peer.mesh.recv(1, 1, 2, second.data(), 6, 2);
  CHECK_OK(peer.await(2));
  EXPECT_EQ(first + second, "firstsecond");
  has(peer.poll(1000), "lost host 1");
}

TEST(a_receive_that_can_not_come_fails_at_once) {
  RawPeer peer(1);
  peer.send(0, 1, 1, "first");
  CHECK_OK(peer.poll(20));
  peer.ends.clear();
  CHECK_OK(peer.poll(300));
  char byte;
  peer.mesh.recv(1, 7, 7, &byte, 1, 0);
  const int64_t start = now_ns();
  has(peer.error(), "lost host 1");
  EXPECT(now_ns() - start < 5 * kNsPerS);
}

TEST(death_in_the_middle_of_a_message) {
  RawPeer peer(1);
  const std::string payload = pattern(100'000, 1);
  std::string in(payload.size(), '\0');
  peer.mesh.recv(1, 1, 1, in.data(), in.size(), 0);
  const FrameHeader header = peer.header(0, FrameType::kData, 1, 1, payload);
  peer.write(0, &header, sizeof header);
  peer.write(0, payload.data(), 40'000);
  peer.ends.clear();
  has(peer.error(), "lost host 1: it closed the connection in the middle of a message");
  EXPECT(peer.done.empty());
}

TEST(reset_of_one_stream) {
  RawPeer peer(2);
  std::string in(5, '\0');
  peer.mesh.recv(1, 1, 1, in.data(), 5, 0);
  const linger now{1, 0};
  ::setsockopt(peer.ends[0].get(), SOL_SOCKET, SO_LINGER, &now, sizeof now);
  peer.ends[0].reset();
  const Status status = peer.error();  // although the other stream lives
  EXPECT(status.code() == Code::kUnavailable);
  has(status, "lost host 1: the connection broke");
}

TEST(loss_while_sending) {
  RawPeer peer(1);
  const std::string payload = pattern(Mesh::kMaxMessage, 1);
  for (uint64_t i = 0; i < 4; ++i) peer.mesh.send(1, 1, i, payload.data(), payload.size(), i);
  CHECK_OK(peer.poll(50));
  peer.ends.clear();  // with unread bytes: a reset
  has(peer.error(), "lost host 1");
}

TEST(foreign_frames_are_dropped_and_counted) {
  RawPeer peer(1);
  const std::string payload = pattern(100'000, 1);
  std::string in(payload.size(), '\0');
  peer.mesh.recv(1, 1, 1, in.data(), in.size(), 0);
  FrameHeader old = peer.header(0, FrameType::kData, 1, 1, payload);
  old.generation = 4;
  old.header_crc = old.compute_crc();
  peer.write_frame(0, old, payload);
  FrameHeader other = peer.header(0, FrameType::kControl, 0, 0, "stale");
  other.comm = 9;
  other.header_crc = other.compute_crc();
  peer.write_frame(0, other, "stale");
  peer.send(0, 1, 1, payload);
  CHECK_OK(peer.await(1));
  EXPECT(peer.done[0].event == Event::kReceived);
  EXPECT(in == payload);
  EXPECT_EQ(peer.mesh.counters().frames_dropped, 2u);
}

TEST(damaged_payload) {
  for (const size_t where : {0, 70'000, 99'999}) {
    RawPeer peer(1);
    std::string payload = pattern(100'000, 1);
    std::string in(payload.size(), '\0');
    peer.mesh.recv(1, 1, 1, in.data(), in.size(), 0);
    const FrameHeader header = peer.header(0, FrameType::kData, 1, 1, payload);
    payload[where] ^= 4;
    peer.write_frame(0, header, payload);
    const Status status = peer.error();
    EXPECT(status.code() == Code::kCorrupt);
    has(status, "host 1, stream 0: the checksum of a message is wrong");
  }
}

Status after_header(const std::function<void(FrameHeader*)>& change, bool sign = true) {
  RawPeer peer(1);
  FrameHeader header = peer.header(0, FrameType::kData, 1, 1, "hello");
  change(&header);
  if (sign) header.header_crc = header.compute_crc();
  peer.write_frame(0, header, "hello");
  std::string in(5, '\0');
  peer.mesh.recv(1, 1, 1, in.data(), 5, 0);
  return peer.error();
}

TEST(damaged_headers) {
  for (size_t byte = 0; byte < 64; ++byte) {
    const Status status = after_header([&](FrameHeader* h) { reinterpret_cast<uint8_t*>(h)[byte] ^= 0x10; }, false);
    EXPECT(status.code() == Code::kCorrupt);
    has(status, "host 1, stream 0: a frame header is damaged");
  }
}

TEST(headers_that_lie) {
  has(after_header([](FrameHeader* h) { h->magic = 1; }), "damaged");
  has(after_header([](FrameHeader* h) { h->header_bytes = 32; }), "claims 32 bytes");
  has(after_header([](FrameHeader* h) { h->type = static_cast<FrameType>(7); }), "unknown type 7");
  has(after_header([](FrameHeader* h) { h->payload_bytes = Mesh::kMaxMessage + 1; }), "more than is allowed");
  has(after_header([](FrameHeader* h) { h->payload_bytes = ~0u; }), "more than is allowed");
  has(after_header([](FrameHeader* h) {
        h->type = FrameType::kControl;
        h->payload_bytes = Mesh::kMaxControl + 1;
      }),
      "more than is allowed");
  has(after_header([](FrameHeader* h) { h->sequence = 3; }), "frame 0 was due and frame 3 came");
  const Status status = after_header([](FrameHeader* h) { h->payload_bytes = 6; });
  EXPECT(status.code() == Code::kInvalid);
  has(status, "host 1 sent 6 bytes where 5 were expected (operation 1, tag 1)");
}

TEST(random_bytes) {
  for (unsigned seed = 0; seed < 8; ++seed) {
    RawPeer peer(1);
    const std::string noise = pattern(10'000, seed);
    peer.write(0, noise.data(), noise.size());
    EXPECT(peer.error().code() == Code::kCorrupt);
  }
}

TEST(the_same_message_twice) {
  RawPeer peer(2);
  std::string in(5, '\0');
  peer.mesh.recv(1, 1, 1, in.data(), 5, 0);
  peer.send(0, 1, 1, "hello");
  peer.send(1, 1, 1, "HELLO");
  CHECK_OK(peer.await(1));
  const std::string got = in;
  CHECK_OK(peer.poll(50));
  EXPECT_EQ(peer.done.size(), 1u);  // the second waits for a receive of its own and touches nothing
  EXPECT_EQ(in, got);
}

TEST(a_peer_that_never_connects) {
  MeshOptions options = test::mesh_options(0, 3, 2);
  options.connect_timeout_ns = 60 * kNsPerMs;
  Mesh mesh(options);
  std::vector<Mesh::Completion> done;
  CHECK_OK(mesh.poll(in_ms(100), &done));  // no need for it yet
  char byte;
  mesh.recv(2, 1, 1, &byte, 1, 0);
  const Status status = collect_error(&mesh, &done);
  EXPECT(status.code() == Code::kTimeout);
  has(status, "host 2 has connected 0 of 2 streams in 0.1 s");
}

}  // namespace
}  // namespace bagua
