// Meshes on encrypted connections: the same messages arrive, and somebody between the two hosts, who can read and
// write every byte on the way, can do nothing but end the connection.
#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "mesh_rig.h"

namespace bagua {
namespace {

using test::collect;
using test::collect_error;
using test::has;
using test::in_ms;
using test::mesh_options;
using test::pattern;
using test::sealed_pair;
using test::tcp_pair;
using Event = Mesh::Event;

constexpr size_t kFrameHeader = sizeof(FrameHeader) + Sealer::kTagBytes;

// Two meshes, all of whose connections are encrypted.
struct SealedMeshes {
  Mesh a{mesh_options(0, 2, 2)}, b{mesh_options(1, 2, 2)};

  explicit SealedMeshes(Cipher cipher = Cipher::kAes256Gcm, uint64_t bytes_per_key = Sealer::kBytesPerKey) {
    for (int stream = 0; stream < 3; ++stream) {
      Connection near, far;
      tcp_pair(&near.socket, &far.socket);
      sealed_pair(static_cast<uint8_t>(stream), &near.seals, &far.seals, cipher, bytes_per_key);
      a.attach(1, stream, std::move(near));
      b.attach(0, stream, std::move(far));
    }
  }
};

// Both are driven until each has its completions.
void both(Mesh* a, size_t for_a, Mesh* b, size_t for_b, std::vector<Mesh::Completion>* done_b) {
  test::Threads threads;
  threads.start([=] {
    std::vector<Mesh::Completion> done;
    CHECK_OK(collect(a, for_a, &done));
  });
  CHECK_OK(collect(b, for_b, done_b));
  threads.join();
}

TEST(messages_arrive) {
  for (const Cipher cipher : {Cipher::kAes256Gcm, Cipher::kChaCha20Poly1305}) {
    SealedMeshes meshes(cipher, 300'000);  // keys change on the way
    const std::vector<size_t> sizes = {0, 1, 15, 16, 17, 4096, 16'384, 131'071, 131'072, 131'073, 524'288, 1'048'579};
    std::vector<std::string> out, in;
    for (size_t i = 0; i < sizes.size(); ++i) {
      out.push_back(pattern(sizes[i], static_cast<unsigned>(i)));
      in.emplace_back(sizes[i], '\0');
    }
    for (size_t i = 0; i < sizes.size(); ++i) {
      meshes.b.recv(0, 1, i, in[i].data(), in[i].size(), i);
      meshes.a.send(1, 1, i, out[i].data(), out[i].size(), i);
    }
    meshes.a.send_control(1, "a word");
    std::vector<Mesh::Completion> done;
    both(&meshes.a, sizes.size(), &meshes.b, sizes.size() + 1, &done);
    EXPECT(in == out);
    EXPECT(std::any_of(done.begin(), done.end(), [](const auto& one) { return one.control == "a word"; }));
    const Mesh::Counters counters = meshes.a.counters();
    EXPECT_EQ(counters.bytes_encrypted, counters.bytes_sent);
  }
}

TEST(messages_may_be_parked) {
  SealedMeshes meshes;
  const std::string first = pattern(70'000, 1), second = pattern(70'000, 2);
  meshes.a.send(1, 1, 1, first.data(), first.size(), 1);
  meshes.a.send(1, 1, 2, second.data(), second.size(), 2);
  std::vector<Mesh::Completion> done;
  CHECK_OK(meshes.a.poll(in_ms(1000), &done));
  CHECK_OK(meshes.b.poll(in_ms(20), &done));
  std::string in1(70'000, '\0'), in2(70'000, '\0');
  done.clear();
  meshes.b.recv(0, 1, 2, in2.data(), in2.size(), 2);
  meshes.b.recv(0, 1, 1, in1.data(), in1.size(), 1);
  CHECK_OK(collect(&meshes.b, 2, &done));
  EXPECT(in1 == first && in2 == second);
}

// ---- somebody in between

constexpr size_t kBytes = 5000;                                       // of a message
constexpr size_t kFrame = kFrameHeader + kBytes + Sealer::kTagBytes;  // of its frame
constexpr size_t kFrames = 3;

// Three messages of host 1 on each of two streams pass through the test to host 0.
struct Tapped {
  Mesh victim{mesh_options(0, 2, 2)};
  std::vector<Fd> to_victim;
  std::vector<std::string> frames[2];  // by stream
  std::vector<std::string> in;
  std::vector<std::string> sent;

  explicit Tapped(uint8_t keys = 0) {
    for (int stream = 0; stream < 2; ++stream) {
      Connection near, far;
      Fd tap, out;
      tcp_pair(&near.socket, &out);
      tcp_pair(&far.socket, &tap);
      sealed_pair(static_cast<uint8_t>(keys + stream), &near.seals, &far.seals);
      victim.attach(1, stream, std::move(near));
      to_victim.push_back(std::move(out));
      record(std::move(far), &tap, stream);
    }
    in.assign(2 * kFrames, std::string(kBytes, '\0'));
    for (size_t i = 0; i < in.size(); ++i) victim.recv(1, 1, i, in[i].data(), kBytes, i);
  }

  // The frames of messages 3 * stream to 3 * stream + 2, written by a mesh that has this stream alone.
  void record(Connection far, Fd* tap, int stream) {
    Mesh sender(mesh_options(1, 2, 1));
    sender.attach(0, 0, std::move(far));
    std::vector<Mesh::Completion> done;
    for (size_t i = 0; i < kFrames; ++i) {
      sent.push_back(pattern(kBytes, static_cast<unsigned>(sent.size())));
    }
    const size_t first = kFrames * static_cast<size_t>(stream);
    for (size_t i = first; i < first + kFrames; ++i) sender.send(0, 1, i, sent[i].data(), kBytes, i);
    CHECK_OK(collect(&sender, kFrames, &done));
    for (size_t i = 0; i < kFrames; ++i) {
      std::string frame(kFrame, '\0');
      CHECK_OK(read_exact(tap->get(), frame.data(), kFrame, in_ms(5000)));
      frames[stream].push_back(frame);
    }
  }

  void write(size_t stream, const std::string& bytes) {
    CHECK_OK(write_exact(to_victim[stream].get(), bytes.data(), bytes.size(), in_ms(5000)));
  }

  // The victim's error; whatever it took before is right.
  Status outcome() {
    std::vector<Mesh::Completion> done;
    Status status = collect_error(&victim, &done);
    for (const Mesh::Completion& one : done) {
      CHECK(one.event == Event::kReceived);
      EXPECT(in[one.cookie] == sent[one.cookie]);
    }
    received = done.size();
    return status;
  }
  size_t received = 0;
};

constexpr const char* kWords = "host 1, stream 0: what came is not what it sent";

// The attack on version 0.1: the payload of a plain frame is replaced, and both checksums are mended.
std::string plain_frame() {
  FrameHeader header;
  header.generation = 5;
  header.comm = 2;
  header.op = 1;
  header.payload_bytes = kBytes;
  const std::string payload(kBytes, 'x');
  header.payload_crc = crc32c(payload.data(), payload.size());
  header.header_crc = header.compute_crc();
  return std::string(reinterpret_cast<const char*>(&header), sizeof header) + payload;
}

// Bytes, and how many messages arrive before it is noticed that they are not the peer's.
std::vector<std::pair<std::string, size_t>> attacks() {
  const Tapped whole, before(100);
  const std::vector<std::string>& frames = whole.frames[0];
  const std::string header = frames[0].substr(0, kFrameHeader);
  std::vector<std::pair<std::string, size_t>> all;
  for (const size_t where :
       {size_t{0}, size_t{30}, kFrameHeader - 1, kFrameHeader, size_t{2500}, kFrame - 17, kFrame - 16, kFrame - 1}) {
    std::string changed = frames[1];
    changed[where] = static_cast<char>(changed[where] ^ 0x10);
    all.emplace_back(frames[0] + changed, 1);
  }
  all.emplace_back(frames[0] + frames[0], 1);  // repeated, left out, exchanged
  all.emplace_back(frames[0] + frames[2], 1);
  all.emplace_back(frames[1], 0);
  all.emplace_back(frames[0] + frames[1] + frames[0], 2);
  all.emplace_back(header + frames[1].substr(kFrameHeader) + frames[1], 0);       // another message's payload
  all.emplace_back(header + frames[0].substr(kFrameHeader + 16) + frames[1], 0);  // the next frame fills the gap
  all.emplace_back(header + std::string(kFrame, 'x') + frames[1], 0);             // made up
  all.emplace_back(whole.frames[1][0], 0);                                        // of the other stream
  all.emplace_back(before.frames[0][0], 0);  // of an earlier connection of the same two hosts
  all.emplace_back(plain_frame(), 0);
  return all;
}

TEST(attacks_are_noticed) {
  for (const auto& [bytes, arrives] : attacks()) {
    Tapped tapped;
    tapped.write(0, bytes);
    const Status status = tapped.outcome();
    EXPECT(status.code() == Code::kCorrupt);
    has(status, kWords);
    EXPECT_EQ(tapped.received, arrives);
    EXPECT_EQ(tapped.victim.counters().frames_refused, 1u);
  }
}

TEST(a_cut_in_the_middle_is_noticed) {
  for (const size_t bytes : {size_t{1}, kFrameHeader - 1, kFrameHeader, kFrame - 16, kFrame - 1}) {
    Tapped tapped;
    tapped.write(0, tapped.frames[0][0].substr(0, bytes));
    tapped.to_victim[0].reset();
    has(tapped.outcome(), "lost host 1: it closed the connection in the middle of a message");
    EXPECT_EQ(tapped.received, 0u);
  }
}

TEST(a_cut_between_frames_is_a_loss) {
  Tapped tapped;
  tapped.write(0, tapped.frames[0][0]);
  tapped.to_victim.clear();
  has(tapped.outcome(), "lost host 1: it closed the connection");
  EXPECT_EQ(tapped.received, 1u);
}

TEST(frames_of_ones_own_are_noticed) {
  Tapped tapped;
  const std::string text = pattern(kBytes, 9);
  tapped.victim.send(1, 1, 0, text.data(), text.size(), 77);
  std::vector<Mesh::Completion> done;
  CHECK_OK(collect(&tapped.victim, 1, &done));
  std::string frame(kFrame, '\0');
  size_t stream = 0;
  if (!read_exact(tapped.to_victim[0].get(), frame.data(), kFrame, in_ms(20))) {
    stream = 1;
    CHECK_OK(read_exact(tapped.to_victim[1].get(), frame.data(), kFrame, in_ms(5000)));
  }
  EXPECT(frame.find(text.substr(100, 64)) == std::string::npos);  // nothing of it can be read
  tapped.write(stream, frame);
  has(tapped.outcome(), "what came is not what it sent");
}

// Keys belong to one communicator of one generation, so that even the right keys bring no other's frames in.
TEST(frames_of_another_generation_end_it) {
  Mesh mesh(mesh_options(0, 2, 1));
  MeshOptions old = mesh_options(1, 2, 1);
  old.generation = 4;
  Mesh other(old);
  Connection near, far;
  tcp_pair(&near.socket, &far.socket);
  sealed_pair(0, &near.seals, &far.seals);
  mesh.attach(1, 0, std::move(near));
  other.attach(0, 0, std::move(far));
  other.send(0, 1, 1, "stale", 5, 0);
  std::vector<Mesh::Completion> sent, done;
  CHECK_OK(other.poll(now_ns(), &sent));
  has(collect_error(&mesh, &done), "host 1, stream 0: a frame of another generation or communicator");
  EXPECT(done.empty());
}

}  // namespace
}  // namespace bagua
