// Engines of several hosts in one test, with ranks as threads.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "channel/client.h"
#include "codec/codec.h"
#include "engine/job/engine.h"
#include "harness.h"

namespace bagua::test {

constexpr size_t kSegment = 1 << 20;

class Rank {
 public:
  Rank(const std::string& socket, int rank) : rank_(rank) {
    const std::vector<uint8_t> token(kTokenBytes, static_cast<uint8_t>(rank + 1));
    CHECK_OK(ChannelClient::connect(socket, token.data(), rank, 10 * kNsPerS, &client_));
    CHECK_OK(client_->alloc(kSegment, &src_));
    CHECK_OK(client_->alloc(kSegment, &dst_));
  }

  Status start(Kind kind, uint64_t count, int root, uint64_t* ticket, uint32_t comm = 0) {
    return client_->submit(descriptor(kind, count, root, comm), ticket);
  }
  // An all-reduce that crosses between hosts encoded, with a residual if its number is not 0.
  Status start_encoded(uint64_t count, Codec codec, uint32_t residual, uint64_t* ticket, uint32_t comm = 0,
                       ReduceOp op = ReduceOp::kSum, ResidualSides sides = kInPlace) {
    Descriptor d = descriptor(Kind::kAllReduce, count, -1, comm);
    d.codec = static_cast<uint8_t>(codec);
    d.density = codec == Codec::kTopK ? 1000 : 0;
    d.residual = residual;
    d.op = static_cast<uint8_t>(op);
    d.residual_sides = sides;
    d.exact = 3;
    return client_->submit(d, ticket);
  }
  Status wait(uint64_t ticket) {
    ChannelClient::Times times;
    return client_->wait(ticket, now_ns() + 60 * kNsPerS, nullptr, &times);
  }
  Status run(Kind kind, uint64_t count, int root = -1, uint32_t comm = 0) {
    uint64_t ticket = 0;
    if (Status status = start(kind, count, root, &ticket, comm); !status) return status;
    return wait(ticket);
  }

  float* src() { return reinterpret_cast<float*>(src_.memory->data()); }
  float* dst() { return reinterpret_cast<float*>(dst_.memory->data()); }
  ChannelClient& client() { return *client_; }
  void die() { client_.reset(); }  // without a goodbye
  void leave() {
    if (client_ != nullptr) client_->close();
  }
  int rank() const { return rank_; }

 private:
  Descriptor descriptor(Kind kind, uint64_t count, int root, uint32_t comm) const {
    Descriptor d{};
    d.kind = static_cast<uint8_t>(kind);
    d.comm = comm;
    d.count = count;
    d.root = root;
    d.src_segment = static_cast<uint32_t>(src_.id);
    d.dst_segment = static_cast<uint32_t>(dst_.id);
    return d;
  }

  const int rank_;
  std::unique_ptr<ChannelClient> client_;
  ChannelClient::Allocation src_, dst_;
};

class Job {
 public:
  explicit Job(std::vector<std::vector<int>> hosts, size_t chunk = 4096, bool measure_ring = true,
               Encryption encryption = Encryption::kBeyondLoopback, bool elastic = false,
               int64_t connect_timeout_ns = 30 * kNsPerS)
      : hosts_(std::move(hosts)) {
    static std::atomic<int> next{0};
    std::vector<std::string> addresses;
    for (size_t h = 0; h < hosts_.size(); ++h) {
      EngineOptions options;
      options.credentials.job_id = "job";
      options.credentials.encryption = encryption;
      options.data_socket = "/tmp/bagua-engine-" + std::to_string(getpid()) + "-" + std::to_string(next++) + ".sock";
      for (const int rank : hosts_[h]) {
        options.tokens.emplace_back(rank, std::vector<uint8_t>(kTokenBytes, static_cast<uint8_t>(rank + 1)));
      }
      options.listen = "127.0.0.1:0";
      options.streams = 2;
      options.connect_timeout_ns = connect_timeout_ns;
      options.chunk_bytes = chunk;
      options.threads = 2;
      options.measure_ring = measure_ring;
      options.elastic = elastic;
      sockets_.push_back(options.data_socket);
      engines_.emplace_back();
      CHECK_OK(Engine::create(std::move(options), {3, static_cast<int>(h), hosts_, {}}, &engines_.back()));
      addresses.push_back(engines_.back()->address());
    }
    for (auto& engine : engines_) CHECK_OK(engine->set_peers(addresses));
  }
  ~Job() { close(); }

  // Runs `body` for every rank of the first `hosts` hosts on a thread of its own.
  template <class F>
  void each(F body, size_t hosts = SIZE_MAX) {
    Threads threads;
    for (size_t h = 0; h < std::min(hosts, hosts_.size()); ++h) {
      for (const int rank : hosts_[h]) {
        threads.start([this, body, h, rank] {
          Rank member(sockets_[h], rank);
          body(member);
          member.leave();
        });
      }
    }
  }
  // As a node daemon each: at the same time.
  void close() {
    Threads threads;
    for (auto& engine : engines_) threads.start([&engine] { engine->close(); });
  }
  Engine& engine(size_t host) { return *engines_[host]; }
  const std::string& socket(size_t host) const { return sockets_[host]; }
  // The ring event of host `host`; empty: none came.
  std::string ring(size_t host) {
    for (const Event& event : engines_[host]->events()) {
      if (std::string(event.kind) == "ring") return event.text;
    }
    return "";
  }

 private:
  const std::vector<std::vector<int>> hosts_;
  std::vector<std::string> sockets_;
  std::vector<std::unique_ptr<Engine>> engines_;
};

inline void expect(const float* values, uint64_t count, float first, float step) {
  for (uint64_t i = 0; i < count; ++i) CHECK_EQ(values[i], first + step * static_cast<float>(i % 16));
}

inline void fill(Rank* rank, uint64_t count) {
  for (uint64_t i = 0; i < count; ++i) rank->src()[i] = static_cast<float>(rank->rank()) + static_cast<float>(i % 16);
}

}  // namespace bagua::test
