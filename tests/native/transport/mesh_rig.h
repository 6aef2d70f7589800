// Hosts of a mesh as objects in one test, joined by TCP on loopback, and raw streams on which a test plays a peer by
// hand.
#pragma once

#include <sys/socket.h>

#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/clock.h"
#include "harness.h"
#include "net/socket.h"
#include "transport/frame.h"
#include "transport/mesh.h"

namespace bagua::test {

inline int64_t in_ms(int64_t ms) {
  return now_ns() + ms * kNsPerMs;
}

inline void tcp_pair(Fd* a, Fd* b) {
  Fd listener;
  std::string address;
  std::string peer;
  CHECK_OK(listen_tcp("127.0.0.1:0", &listener, &address));
  CHECK_OK(connect_tcp(address, in_ms(5000), a));
  CHECK_OK(accept_tcp(listener.get(), b, &peer));
}

inline MeshOptions mesh_options(int host, int hosts, int streams) {
  MeshOptions options;
  options.generation = 5;
  options.comm = 2;
  options.host = host;
  options.hosts = hosts;
  options.streams = streams;
  return options;
}

// The two ends of an encrypted connection, as a handshake makes them. Each `number` has keys of its own; they change
// every `bytes_per_key`.
inline void sealed_pair(uint8_t number, Seals* a, Seals* b, Cipher cipher = Cipher::kAes256Gcm,
                        uint64_t bytes_per_key = Sealer::kBytesPerKey) {
  Digest forth{}, back{};
  forth.fill(number);
  back.fill(static_cast<uint8_t>(~number));
  for (Seals* seals : {a, b}) {
    seals->out = std::make_unique<Sealer>();
    seals->in = std::make_unique<Opener>();
  }
  CHECK_OK(a->out->open(cipher, forth, bytes_per_key));
  CHECK_OK(b->in->open(cipher, forth, bytes_per_key));
  CHECK_OK(b->out->open(cipher, back, bytes_per_key));
  CHECK_OK(a->in->open(cipher, back, bytes_per_key));
}

// `hosts` meshes, fully connected.
inline std::vector<std::unique_ptr<Mesh>> make_meshes(int hosts, int streams, bool lanes = true) {
  std::vector<std::unique_ptr<Mesh>> meshes;
  for (int i = 0; i < hosts; ++i) meshes.push_back(std::make_unique<Mesh>(mesh_options(i, hosts, streams)));
  for (int i = 0; i < hosts; ++i) {
    for (int j = i + 1; j < hosts; ++j) {
      for (int s = 0; s < streams + (lanes ? 1 : 0); ++s) {
        Fd a;
        Fd b;
        tcp_pair(&a, &b);
        meshes[static_cast<size_t>(i)]->attach(j, s, std::move(a));
        meshes[static_cast<size_t>(j)]->attach(i, s, std::move(b));
      }
    }
  }
  return meshes;
}

// Polls until `count` completions are there, an error comes or the time has passed (which is an error, too).
inline Status collect(Mesh* mesh, size_t count, std::vector<Mesh::Completion>* out, int64_t longest_ms = 20'000) {
  const int64_t deadline = in_ms(longest_ms);
  while (out->size() < count) {
    if (Status status = mesh->poll(deadline, out); !status) return status;
    if (now_ns() >= deadline) {
      return {Code::kTimeout, "only " + std::to_string(out->size()) + " of " + std::to_string(count) +
                                  " completions; " + mesh->describe_waits(now_ns())};
    }
  }
  return Status::ok();
}

// The next error of a mesh, with what completed before it.
inline Status collect_error(Mesh* mesh, std::vector<Mesh::Completion>* out) {
  return collect(mesh, 1u << 30, out);
}

// A mesh (host 0 of 2) whose peer is the test itself, on raw streams.
struct RawPeer {
  Mesh mesh;
  std::vector<Fd> ends;  // the test's ends; the last is the control lane's, with `lane`
  std::vector<uint64_t> sequences;
  std::vector<Mesh::Completion> done;

  explicit RawPeer(int streams = 1, bool lane = false) : RawPeer(streams, lane, mesh_options(0, 2, streams)) {}

  RawPeer(int streams, bool lane, MeshOptions options) : mesh(std::move(options)) {
    for (int s = 0; s < streams + (lane ? 1 : 0); ++s) {
      Fd a;
      Fd b;
      tcp_pair(&a, &b);
      mesh.attach(1, s, std::move(a));
      ends.push_back(std::move(b));
      sequences.push_back(0);
    }
  }

  Status poll(int64_t ms) { return mesh.poll(in_ms(ms), &done); }
  Status await(size_t count) { return collect(&mesh, count, &done); }
  Status error() { return collect_error(&mesh, &done); }

  FrameHeader header(size_t stream, FrameType type, uint64_t op, uint64_t tag, const std::string& payload) {
    FrameHeader header;
    header.type = type;
    header.generation = 5;
    header.comm = 2;
    header.payload_bytes = static_cast<uint32_t>(payload.size());
    header.op = op;
    header.tag = tag;
    header.sequence = sequences[stream]++;
    header.payload_crc = crc32c(payload.data(), payload.size());
    header.header_crc = header.compute_crc();
    return header;
  }
  void write(size_t stream, const void* data, size_t n) {
    CHECK_OK(write_exact(ends[stream].get(), data, n, in_ms(5000)));
  }
  void write_frame(size_t stream, FrameHeader header, const std::string& payload) {
    write(stream, &header, sizeof header);
    write(stream, payload.data(), payload.size());
  }
  void send(size_t stream, uint64_t op, uint64_t tag, const std::string& payload) {
    write_frame(stream, header(stream, FrameType::kData, op, tag, payload), payload);
  }
};

inline std::string pattern(size_t n, unsigned seed) {
  std::string bytes(n, '\0');
  uint32_t x = seed * 2654435761u + 1;
  for (char& byte : bytes) {
    x = x * 1664525u + 1013904223u;
    byte = static_cast<char>(x >> 24);
  }
  return bytes;
}

}  // namespace bagua::test
