// The mesh in good order: many messages, sizes, hosts, orders; parking, control messages, waking, bounded memory.
#include "transport/mesh.h"

#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <map>
#include <numeric>
#include <thread>

#include "mesh_rig.h"

namespace bagua {
namespace {

using test::collect;
using test::in_ms;
using test::make_meshes;
using test::pattern;
using Event = Mesh::Event;

TEST(empty_and_largest) {
  auto meshes = make_meshes(2, 2);
  const std::string out = pattern(Mesh::kMaxMessage, 1);
  std::string in(out.size(), '\0');
  test::Threads threads;
  threads.start([&] {
    std::vector<Mesh::Completion> done;
    meshes[0]->send(1, 1, 0, nullptr, 0, 0);
    meshes[0]->send(1, 1, 1, out.data(), out.size(), 0);
    meshes[0]->send(1, 1, 2, nullptr, 0, 0);
    CHECK_OK(collect(meshes[0].get(), 3, &done));
  });
  std::vector<Mesh::Completion> done;
  meshes[1]->recv(0, 1, 2, nullptr, 0, 2);
  meshes[1]->recv(0, 1, 1, in.data(), in.size(), 1);
  meshes[1]->recv(0, 1, 0, nullptr, 0, 0);
  EXPECT_OK(collect(meshes[1].get(), 3, &done));
  threads.join();
  EXPECT(in == out);
}

// Every host sends `messages` messages of random sizes to every other; receives are posted in windows, out of order.
void exchange(int hosts, int streams, int messages, size_t largest) {
  auto meshes = make_meshes(hosts, streams);
  const auto size_of = [&](int from, int to, int i) {
    return static_cast<size_t>((from * 7919 + to * 104729 + i * 1299709) % 100 * static_cast<int>(largest / 100));
  };
  test::Threads threads;
  for (int host = 0; host < hosts; ++host) {
    threads.start([&, host] {
      Mesh& mesh = *meshes[static_cast<size_t>(host)];
      std::mt19937 random(static_cast<unsigned>(host));
      std::deque<std::string> out;  // never moves its strings
      std::map<uint64_t, std::string> in;
      size_t expected = 0;
      for (int i = 0; i < messages; ++i) {
        for (int peer = 0; peer < hosts; ++peer) {
          if (peer == host) continue;
          out.push_back(pattern(size_of(host, peer, i), static_cast<unsigned>(host * 1000 + i)));
          mesh.send(peer, 9, static_cast<uint64_t>(i), out.back().data(), out.back().size(), 1);
          ++expected;
        }
      }
      std::vector<Mesh::Completion> done;
      for (int start = 0; start < messages; start += 8) {  // a window of eight, in random order
        std::vector<int> window(static_cast<size_t>(std::min(8, messages - start)));
        std::iota(window.begin(), window.end(), start);
        std::shuffle(window.begin(), window.end(), random);
        for (const int i : window) {
          for (int peer = 0; peer < hosts; ++peer) {
            if (peer == host) continue;
            const auto cookie = static_cast<uint64_t>(peer) << 32 | static_cast<uint64_t>(i);
            std::string& place = in[cookie];
            place.resize(size_of(peer, host, i));
            mesh.recv(peer, 9, static_cast<uint64_t>(i), place.data(), place.size(), cookie);
            ++expected;
          }
        }
        if (random() % 2 == 0) CHECK_OK(mesh.poll(in_ms(1), &done));
      }
      CHECK_OK(collect(&mesh, expected, &done));
      EXPECT_EQ(done.size(), expected);
      for (const auto& [cookie, bytes] : in) {
        const auto peer = static_cast<unsigned>(cookie >> 32);
        EXPECT(bytes == pattern(bytes.size(), peer * 1000 + static_cast<unsigned>(cookie)));
      }
    });
  }
  threads.join();
}

TEST(many_messages) {
  exchange(2, 4, 200, 100'000);
  exchange(2, 1, 60, 300'000);
  exchange(3, 2, 60, 400'000);
  exchange(3, 3, 500, 1'000);
}

TEST(early_frames_are_parked) {
  test::RawPeer peer(2);
  const std::string first = pattern(50'000, 1);
  const std::string second = pattern(20, 2);
  peer.send(0, 1, 10, first);
  peer.send(0, 1, 11, second);
  CHECK_OK(peer.poll(50));
  EXPECT(peer.done.empty());
  // The other stream is not held up.
  std::string other(5, '\0');
  peer.mesh.recv(1, 2, 0, other.data(), 5, 3);
  peer.send(1, 2, 0, "hello");
  CHECK_OK(peer.await(1));
  EXPECT_EQ(other, "hello");
  // Posted last first: the one at the head of the stream frees the other.
  std::string in_second(second.size(), '\0');
  std::string in_first(first.size(), '\0');
  peer.mesh.recv(1, 1, 11, in_second.data(), in_second.size(), 2);
  CHECK_OK(peer.poll(20));
  EXPECT_EQ(peer.done.size(), 1u);
  peer.mesh.recv(1, 1, 10, in_first.data(), in_first.size(), 1);
  CHECK_OK(peer.await(3));
  EXPECT(in_first == first && in_second == second);
}

TEST(a_stalled_receiver_holds_the_sender_back) {
  auto meshes = make_meshes(2, 2);
  constexpr size_t kBytes = 1 << 20;
  constexpr size_t kCount = 64;
  const std::string out = pattern(kBytes, 1);
  for (size_t i = 0; i < kCount; ++i) meshes[0]->send(1, 1, i, out.data(), kBytes, i);
  std::vector<Mesh::Completion> sent;
  std::vector<Mesh::Completion> received;
  for (int i = 0; i < 20; ++i) {
    CHECK_OK(meshes[0]->poll(in_ms(10), &sent));
    CHECK_OK(meshes[1]->poll(in_ms(10), &received));
  }
  EXPECT(received.empty());
  EXPECT(sent.size() < kCount);                                    // what fits into the kernel's buffers, no more
  EXPECT(meshes[1]->counters().bytes_received <= 2 * (16 << 10));  // user space holds the read-ahead alone
  EXPECT(meshes[0]->describe_waits(now_ns()).find("host 1: 0 receives and") == 0);
  // A control message passes the chunks that fill the data streams.
  meshes[0]->send_control(1, "still here");
  CHECK_OK(collect(meshes[1].get(), 1, &received));
  EXPECT(received[0].event == Event::kControl);
  EXPECT_EQ(received[0].control, "still here");
  std::vector<std::string> in(kCount, std::string(kBytes, '\0'));
  for (size_t i = 0; i < kCount; ++i) meshes[1]->recv(0, 1, i, in[i].data(), kBytes, i);
  while (sent.size() < kCount || received.size() < kCount + 1) {
    CHECK_OK(meshes[0]->poll(in_ms(1), &sent));
    CHECK_OK(meshes[1]->poll(in_ms(1), &received));
  }
  for (const std::string& bytes : in) EXPECT(bytes == out);
}

TEST(control_overtakes_queued_chunks) {
  auto meshes = make_meshes(2, 1);
  constexpr size_t kBytes = 4 << 20;
  constexpr size_t kCount = 16;
  const std::string out = pattern(kBytes, 1);
  std::vector<std::string> in(kCount, std::string(kBytes, '\0'));
  for (size_t i = 0; i < kCount; ++i) meshes[0]->send(1, 1, i, out.data(), kBytes, i);
  meshes[0]->send_control(1, "urgent");
  meshes[0]->send_control(1, "");
  for (size_t i = 0; i < kCount; ++i) meshes[1]->recv(0, 1, i, in[i].data(), kBytes, i);
  std::vector<Mesh::Completion> sent;
  std::vector<Mesh::Completion> received;
  while (received.size() < kCount + 2) {
    CHECK_OK(meshes[0]->poll(in_ms(1), &sent));
    CHECK_OK(meshes[1]->poll(in_ms(1), &received));
  }
  size_t at = 0;
  while (received[at].event != Event::kControl) ++at;
  EXPECT_EQ(received[at].control, "urgent");
  EXPECT(at < kCount - 4);
  const auto is_control = [](const auto& c) { return c.event == Event::kControl; };
  EXPECT_EQ(std::count_if(received.begin(), received.end(), is_control), 2);
}

// Streams come in any order. A message that had taken one would arrive after those that take the lane.
TEST(control_messages_wait_for_their_lane) {
  Mesh a(test::mesh_options(0, 2, 1)), b(test::mesh_options(1, 2, 1));
  std::vector<Mesh::Completion> none, received;
  for (const int stream : {0, 1}) {
    a.send_control(1, "sent when stream " + std::to_string(stream) + " was not there");
    Fd here, there;
    test::tcp_pair(&here, &there);
    a.attach(1, stream, std::move(here));
    b.attach(0, stream, std::move(there));
    CHECK_OK(a.poll(in_ms(1), &none));
    CHECK_OK(b.poll(in_ms(20), &received));
    EXPECT(stream == 1 || received.empty());
  }
  while (received.size() < 2) {
    CHECK_OK(a.poll(in_ms(1), &none));
    CHECK_OK(b.poll(in_ms(1), &received));
  }
  EXPECT_EQ(received[0].control, "sent when stream 0 was not there");
  EXPECT_EQ(received[1].control, "sent when stream 1 was not there");
}

TEST(frames_in_pieces) {
  test::RawPeer peer(1);
  const std::vector<size_t> sizes = {1, 200'000, 0, 65'536, 70'000, 3, 16'000};
  const std::vector<size_t> pieces = {1, 63, 64, 65, 1'000, 65'535, 65'536, 65'537, 90'000};
  std::vector<std::string> payloads;
  std::vector<std::vector<char>> targets;
  std::string stream;
  for (size_t i = 0; i < sizes.size(); ++i) {
    payloads.push_back(std::string(sizes[i], static_cast<char>('a' + i)));
    targets.emplace_back(sizes[i] + 1);
    const FrameHeader header = peer.header(0, FrameType::kData, 1, i, payloads[i]);
    stream.append(reinterpret_cast<const char*>(&header), sizeof header).append(payloads[i]);
  }
  for (size_t i = 0; i < sizes.size(); ++i) peer.mesh.recv(1, 1, i, targets[i].data(), sizes[i], i);
  size_t sent = 0;
  for (size_t i = 0; sent < stream.size(); ++i) {
    const size_t piece = std::min(pieces[i % pieces.size()], stream.size() - sent);
    peer.write(0, stream.data() + sent, piece);
    sent += piece;
    CHECK_OK(peer.poll(2));
  }
  CHECK_OK(peer.await(sizes.size()));
  for (size_t i = 0; i < sizes.size(); ++i) {
    EXPECT(std::string(targets[i].begin(), targets[i].end() - 1) == payloads[i]);
  }
}

// The ranks' computation is interrupted by every time that the mesh wakes up.
TEST(packets_do_not_wake_one_by_one) {
  constexpr size_t kPackets = 500, kPacket = 1'448;
  test::RawPeer peer(1);
  const std::string payload(kPackets * kPacket, 'x');
  std::vector<char> target(payload.size());
  peer.mesh.recv(1, 1, 1, target.data(), target.size(), 7);
  std::thread sender([&] {
    const FrameHeader header = peer.header(0, FrameType::kData, 1, 1, payload);
    peer.write(0, &header, sizeof header);
    for (size_t i = 0; i < kPackets; ++i) {
      peer.write(0, payload.data() + i * kPacket, kPacket);
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  });
  rusage before{}, after{};
  ::getrusage(RUSAGE_THREAD, &before);
  CHECK_OK(peer.await(1));
  ::getrusage(RUSAGE_THREAD, &after);
  sender.join();
  EXPECT(after.ru_nvcsw - before.ru_nvcsw < static_cast<int64_t>(kPackets / 5));
}

TEST(wake_from_another_thread) {
  auto meshes = make_meshes(2, 1);
  std::vector<Mesh::Completion> done;
  test::Threads threads;
  const int64_t start = now_ns();
  threads.start([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    meshes[0]->wake();
  });
  CHECK_OK(meshes[0]->poll(in_ms(20'000), &done));
  EXPECT(now_ns() - start < 10 * kNsPerS);
  EXPECT(done.empty());
  threads.join();
  meshes[0]->wake();  // before poll(): it returns at once
  CHECK_OK(meshes[0]->poll(-1, &done));
  const int64_t again = now_ns();
  CHECK_OK(meshes[0]->poll(in_ms(30), &done));  // taken once
  EXPECT(now_ns() - again >= 25 * kNsPerMs);
}

TEST(attach_refuses_what_it_can_not_use) {
  Mesh mesh(test::mesh_options(0, 2, 1));
  for (const auto& [peer, stream] : {std::pair{-1, 0}, {0, 0}, {2, 0}, {1, -1}, {1, 2}}) {
    Fd a;
    Fd b;
    test::tcp_pair(&a, &b);
    mesh.attach(peer, stream, std::move(a));
    EXPECT(!mesh.connected());
    char byte;
    EXPECT(read_exact(b.get(), &byte, 1, in_ms(2000)).code() == Code::kUnavailable);  // closed
  }
}

}  // namespace
}  // namespace bagua
