// Signs of life: a peer that is waited for and says nothing is asked, and named when it does not answer.
#include <poll.h>
#include <sys/socket.h>

#include "mesh_rig.h"

namespace bagua {
namespace {

using test::collect_error;
using test::in_ms;
using test::RawPeer;

constexpr size_t kLane = 1;  // of RawPeer(1, true)

bool says(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return true;
  test::note_failure(__FILE__, __LINE__, "'" + text + "' lacks '" + part + "'");
  return false;
}

MeshOptions patient(int64_t silence_ms, int64_t first_word_ms) {
  MeshOptions options = test::mesh_options(0, 2, 1);
  options.silence_timeout_ns = silence_ms * kNsPerMs;
  options.first_word_timeout_ns = first_word_ms * kNsPerMs;
  return options;
}

void speak(RawPeer* peer) {
  std::vector<Mesh::Completion> done;
  peer->write_frame(kLane, peer->header(kLane, FrameType::kControl, 0, 0, "hello"), "hello");
  CHECK_OK(test::collect(&peer->mesh, 1, &done));
}

FrameHeader read_header(RawPeer* peer, size_t stream) {
  FrameHeader header;
  CHECK_OK(read_exact(peer->ends[stream].get(), &header, sizeof header, in_ms(10'000)));
  return header;
}

bool readable(const Fd& socket) {
  pollfd item{socket.get(), POLLIN, 0};
  return ::poll(&item, 1, 0) > 0;
}

TEST(a_ping_is_answered) {
  RawPeer peer(1, true);
  peer.write_frame(kLane, peer.header(kLane, FrameType::kPing, 0, 0, ""), "");
  while (!readable(peer.ends[kLane])) CHECK_OK(peer.poll(10));
  const FrameHeader answer = read_header(&peer, kLane);
  EXPECT(answer.type == FrameType::kPong);
  EXPECT_EQ(answer.payload_bytes, 0u);
  EXPECT(peer.done.empty());
}

TEST(a_ping_with_a_payload_is_no_frame) {
  RawPeer peer(1, true);
  peer.write_frame(kLane, peer.header(kLane, FrameType::kPing, 0, 0, "x"), "x");
  EXPECT(peer.error().code() == Code::kCorrupt);
}

TEST(silence_is_asked_about_and_an_answer_ends_it) {
  RawPeer peer(1, true, patient(600'000, 600'000));
  speak(&peer);
  peer.mesh.set_waiting(true);
  while (!readable(peer.ends[kLane])) CHECK_OK(peer.poll(10));
  EXPECT(read_header(&peer, kLane).type == FrameType::kPing);
  EXPECT(!readable(peer.ends[kLane]));  // one question, not many
  const int64_t later = now_ns() + 2 * kNsPerS;
  says(peer.mesh.describe_waits(later), "host 1: 0 receives and 0 sends outstanding for 0.0 s, has not answered for ");
  peer.write_frame(kLane, peer.header(kLane, FrameType::kPong, 0, 0, ""), "");
  CHECK_OK(peer.poll(50));
  EXPECT_EQ(peer.mesh.describe_waits(later), "");
}

TEST(a_silent_peer_is_named) {
  RawPeer peer(1, true, patient(150, 600'000));
  speak(&peer);
  CHECK_OK(peer.poll(300));  // nobody waits for it
  EXPECT(!readable(peer.ends[kLane]));
  peer.mesh.set_waiting(true);
  const Status status = peer.error();
  EXPECT(status.code() == Code::kTimeout);
  says(status.message(), "host 1 has not answered for ");
}

TEST(a_peer_that_has_not_begun_has_longer) {
  RawPeer peer(1, true, patient(30, 400));
  peer.mesh.set_waiting(true);
  const int64_t start = now_ns();
  EXPECT(peer.error().code() == Code::kTimeout);
  EXPECT(now_ns() - start >= 400 * kNsPerMs);
}

TEST(a_peer_that_has_not_begun_has_less_once_steps_are_known) {
  RawPeer peer(1, true, patient(600'000, 600'000));
  peer.mesh.set_first_word_timeout(100 * kNsPerMs);
  peer.mesh.set_waiting(true);
  says(peer.error().message(), "host 1 has not answered for ");
}

TEST(a_peer_that_sends_slowly_is_alive) {
  RawPeer peer(1, true, patient(150, 600'000));
  std::string payload(100'000, 'x');
  std::vector<char> target(payload.size());
  peer.mesh.set_waiting(true);
  peer.mesh.recv(1, 1, 1, target.data(), target.size(), 7);
  const FrameHeader header = peer.header(0, FrameType::kData, 1, 1, payload);
  peer.write(0, &header, sizeof header);
  size_t sent = 0;
  for (; sent < 40'000; sent += 1'000) {  // far longer than it may be silent, and too little for an event
    peer.write(0, payload.data() + sent, 1'000);
    CHECK_OK(peer.poll(25));
  }
  peer.write(0, payload.data() + sent, payload.size() - sent);
  CHECK_OK(peer.await(1));
  EXPECT(std::string(target.begin(), target.end()) == payload);
}

TEST(without_a_lane_nobody_is_asked) {
  RawPeer peer(1, false, patient(30, 30));
  peer.mesh.set_waiting(true);
  CHECK_OK(peer.poll(200));
  EXPECT(!readable(peer.ends[0]));
}

}  // namespace
}  // namespace bagua
