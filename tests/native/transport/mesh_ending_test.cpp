// The end of a mesh: the cause of a failure reaches the other hosts, and nobody waits for a host that has given up.
#include <sys/socket.h>

#include <cerrno>

#include "mesh_rig.h"

namespace bagua {
namespace {

using test::collect;
using test::collect_error;
using test::has;
using test::in_ms;
using test::make_meshes;
using test::pattern;
using test::RawPeer;
using Event = Mesh::Event;

// Reads one control message at the test's end of a lane.
std::string read_control(RawPeer* peer) {
  FrameHeader header;
  CHECK_OK(read_exact(peer->ends.back().get(), &header, sizeof header, in_ms(5000)));
  CHECK(header.type == FrameType::kControl);
  std::string text(header.payload_bytes, '\0');
  CHECK_OK(read_exact(peer->ends.back().get(), text.data(), text.size(), in_ms(5000)));
  return text;
}

// True if the connection ends within 5 s, whatever is read before.
bool ends(int fd) {
  timeval limit{5, 0};
  ::setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  char buffer[65536];
  ssize_t got;
  do {
    got = ::recv(fd, buffer, sizeof buffer, 0);
  } while (got > 0);
  return got == 0 || errno == ECONNRESET;
}

void damage(RawPeer* peer, size_t stream) {
  const std::string noise = pattern(256, 7);
  peer->write(stream, noise.data(), noise.size());
}

TEST(last_words_after_a_damaged_stream) {
  RawPeer peer(2, true);
  const std::string big = pattern(Mesh::kMaxMessage, 1);
  std::string in(5, '\0');
  for (uint64_t i = 0; i < 4; ++i) peer.mesh.send(1, 1, i, big.data(), big.size(), i);  // more than the sockets take
  peer.mesh.recv(1, 1, 1, in.data(), in.size(), 0);
  damage(&peer, 0);
  has(peer.error(), "stream 0: a frame header is damaged");
  peer.mesh.retire();
  EXPECT(peer.mesh.can_tell(1));
  peer.mesh.send_control(1, "the cause");
  peer.send(1, 1, 1, "hello");  // nobody's any more
  peer.write_frame(2, peer.header(2, FrameType::kControl, 0, 0, "heard"), "heard");
  peer.done.clear();
  CHECK_OK(peer.await(1));
  EXPECT(peer.done[0].event == Event::kControl);
  EXPECT_EQ(peer.done[0].control, std::string("heard"));
  EXPECT_EQ(in, std::string(5, '\0'));
  EXPECT_EQ(read_control(&peer), std::string("the cause"));
  peer.mesh.shut_down();
  for (const Fd& end : peer.ends) EXPECT(ends(end.get()));
  has(peer.poll(1000), "stream 0: a frame header is damaged");
}

TEST(last_words_after_a_cut_stream) {
  RawPeer peer(2, true);
  ::shutdown(peer.ends[1].get(), SHUT_RDWR);
  has(peer.error(), "lost host 1");
  peer.mesh.retire();
  peer.mesh.send_control(1, "the cause");
  EXPECT_EQ(read_control(&peer), std::string("the cause"));
}

TEST(last_words_to_a_peer_whose_lane_is_damaged) {
  RawPeer peer(1, true);
  damage(&peer, 1);
  has(peer.error(), "stream 1: a frame header is damaged");
  peer.mesh.retire();
  peer.mesh.send_control(1, "the cause");  // the other direction is sound
  EXPECT_EQ(read_control(&peer), std::string("the cause"));
  CHECK_OK(peer.poll(20));
  peer.mesh.shut_down();
  EXPECT(ends(peer.ends[0].get()) && ends(peer.ends[1].get()));
}

TEST(words_arrive_though_the_connections_end_at_once) {
  auto meshes = make_meshes(3, 2);
  std::vector<Mesh::Completion> done;
  CHECK_OK(meshes[0]->poll(in_ms(20), &done));  // its connections are there
  for (const size_t peer : {1, 2}) meshes[0]->send_control(static_cast<int>(peer), "the cause");
  meshes[0]->shut_down();
  for (const size_t peer : {1, 2}) {
    done.clear();
    has(collect_error(meshes[peer].get(), &done), "lost host 0");
    EXPECT_EQ(done.size(), 1u);
    EXPECT_EQ(done[0].control, std::string("the cause"));
  }
}

TEST(retired_without_a_lane_left) {
  RawPeer peer(1, true);
  peer.ends.clear();
  const Status first = peer.error();
  peer.mesh.retire();
  peer.mesh.send_control(1, "nobody is there");
  EXPECT_EQ(peer.error().message(), first.message());
  EXPECT(!peer.mesh.can_tell(1));
}

TEST(no_connection_after_the_end) {
  Mesh mesh(test::mesh_options(0, 2, 1));
  mesh.shut_down();
  Fd a;
  Fd b;
  test::tcp_pair(&a, &b);
  mesh.attach(1, 0, std::move(a));
  EXPECT(ends(b.get()));
}

// Its lane is lost and its next chunk has come: without the description nobody will ever post the receive.
TEST(a_word_that_can_not_come_fails) {
  RawPeer peer(1, true);
  peer.send(0, 1, 1, "next");
  CHECK_OK(peer.poll(20));
  peer.ends.back().reset();
  CHECK_OK(peer.poll(400));  // nobody needs it yet
  peer.mesh.set_awaited({false, true});
  has(peer.error(), "lost host 1");
}

}  // namespace
}  // namespace bagua
