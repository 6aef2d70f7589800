// Speed of the core's lower half: reductions, checksums, the mesh on loopback. Prints GB/s; nothing is asserted.
//
// g++ -O3 -march=native -std=c++17 -pthread -Icsrc/core csrc/core/{base,kernel,net,transport}/*.cpp
// tests/bench/native_bench.cpp -o /tmp/native_bench && /tmp/native_bench [reduce|kernels|crc|mesh]
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/crc32c.h"
#include "kernel/reduce.h"
#include "transport/mesh.h"

namespace {

using namespace bagua;

constexpr size_t kMiB = 1 << 20;

struct Free {
  void operator()(void* p) const { std::free(p); }
};
using Block = std::unique_ptr<char, Free>;

// Touched memory, aligned to 2 MiB.
Block block(size_t bytes) {
  Block memory(static_cast<char*>(std::aligned_alloc(2 * kMiB, (bytes + 2 * kMiB - 1) / (2 * kMiB) * (2 * kMiB))));
  std::memset(memory.get(), 0, bytes);
  return memory;
}

// Median seconds of `body`, after one run to warm up.
double median_s(int rounds, const std::function<void()>& body) {
  std::vector<double> times;
  for (int i = 0; i <= rounds; ++i) {
    const int64_t start = now_ns();
    body();
    if (i > 0) times.push_back(static_cast<double>(now_ns() - start) * 1e-9);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

void line(const char* what, double bytes, double seconds) {
  std::printf("%-58s %8.3f ms %7.2f GB/s\n", what, seconds * 1e3, bytes / seconds * 1e-9);
  std::fflush(stdout);
}

// `threads` threads, each with its share of `elements`, in parallel.
void parallel(int threads, size_t elements, const std::function<void(size_t, size_t)>& body) {
  std::vector<std::thread> pool;
  const size_t share = elements / static_cast<size_t>(threads);
  for (int t = 1; t < threads; ++t) pool.emplace_back(body, share * static_cast<size_t>(t), share);
  body(0, share);
  for (std::thread& thread : pool) thread.join();
}

void bench_reduce(int ranks, size_t bytes, int threads) {
  std::vector<Block> in;
  std::vector<Block> out;
  for (int r = 0; r < ranks; ++r) {
    in.push_back(block(bytes));
    out.push_back(block(bytes));
  }
  for (const bool nontemporal : {false, true}) {
    const double seconds = median_s(bytes > 4 * kMiB ? 9 : 101, [&] {
      parallel(threads, bytes / 4, [&](size_t first, size_t count) {
        std::vector<const void*> src;
        std::vector<void*> dst;
        for (int r = 0; r < ranks; ++r) {
          src.push_back(in[static_cast<size_t>(r)].get() + first * 4);
          dst.push_back(out[static_cast<size_t>(r)].get() + first * 4);
        }
        reduce(DType::kF32, ReduceOp::kSum, src.data(), ranks, dst.data(), ranks, count, 1, nontemporal);
      });
    });
    char what[96];
    std::snprintf(what, sizeof what, "reduce f32 %d -> %d, %.2f MiB, %d threads%s", ranks, ranks,
                  static_cast<double>(bytes) / kMiB, threads, nontemporal ? ", non-temporal" : "");
    line(what, static_cast<double>(bytes), seconds);
  }
}

void bench_kernels() {
  const size_t bytes = 64 * kMiB;
  const Block a = block(bytes);
  const Block b = block(bytes);
  const Block c = block(bytes);
  line("memcpy 64 MiB", bytes, median_s(9, [&] { std::memcpy(a.get(), b.get(), bytes); }));
  line("memcpy 1 MiB", kMiB, median_s(301, [&] { std::memcpy(a.get(), b.get(), kMiB); }));
  for (const DType t : {DType::kF32, DType::kF16, DType::kBF16, DType::kI32, DType::kU8, DType::kF64}) {
    const std::string name = std::string("a += b, ") + dtype_name(t) + ", ";
    const size_t size = dtype_size(t);
    const auto accumulate = [&](size_t count) {
      const void* const sources[] = {a.get(), b.get()};
      void* const target = a.get();
      reduce(t, ReduceOp::kSum, sources, 2, &target, 1, count, 1, false);
    };
    line((name + "64 MiB").c_str(), bytes, median_s(9, [&] { accumulate(bytes / size); }));
    line((name + "256 KiB").c_str(), kMiB / 4, median_s(301, [&] { accumulate(kMiB / 4 / size); }));
  }
  const void* sources[] = {a.get(), b.get()};
  void* target = c.get();
  line("c = a + b, f32, 64 MiB, non-temporal", bytes,
       median_s(9, [&] { reduce(DType::kF32, ReduceOp::kSum, sources, 2, &target, 1, bytes / 4, 1, true); }));
  line("c = (a + b) / 3, f32, 64 MiB, non-temporal", bytes,
       median_s(9, [&] { reduce(DType::kF32, ReduceOp::kAvg, sources, 2, &target, 1, bytes / 4, 3, true); }));
}

void bench_crc() {
  const Block a = block(64 * kMiB);
  volatile uint32_t sink = 0;
  for (const size_t bytes : {size_t{64}, size_t{4096}, size_t{64} << 10, kMiB / 2, 64 * kMiB}) {
    const int repeat = bytes < kMiB ? 1000 : 1;
    const double seconds = median_s(21, [&] {
      for (int i = 0; i < repeat; ++i) sink = crc32c(a.get(), bytes, sink);
    });
    line(("crc32c of " + std::to_string(bytes) + " bytes").c_str(), static_cast<double>(bytes) * repeat, seconds);
  }
}

void join(Mesh* a, Mesh* b, int streams) {
  for (int s = 0; s <= streams; ++s) {
    Fd listener;
    Fd near;
    Fd far;
    std::string address;
    std::string peer;
    const bool ok = listen_tcp("127.0.0.1:0", &listener, &address).is_ok() &&
                    connect_tcp(address, now_ns() + kNsPerS, &near).is_ok() &&
                    accept_tcp(listener.get(), &far, &peer).is_ok();
    if (!ok) std::abort();
    a->attach(1, s, std::move(near));
    b->attach(0, s, std::move(far));
  }
}

// Sends and receives `rounds` times `count` chunks; drives one side.
void drive(Mesh* mesh, int peer, bool sends, bool receives, char* out, char* in, size_t chunk, size_t count,
           int rounds) {
  std::vector<Mesh::Completion> done;
  for (int round = 0; round < rounds; ++round) {
    const auto op = static_cast<uint64_t>(round);
    for (size_t i = 0; i < count && receives; ++i) mesh->recv(peer, op, i, in + i * chunk, chunk, 0);
    for (size_t i = 0; i < count && sends; ++i) mesh->send(peer, op, i, out + i * chunk, chunk, 0);
    done.clear();
    while (done.size() < count * (static_cast<size_t>(sends) + static_cast<size_t>(receives))) {
      if (Status status = mesh->poll(-1, &done); !status) {
        std::fprintf(stderr, "%s\n", status.message().c_str());
        std::abort();
      }
    }
  }
}

void bench_mesh(int streams, size_t chunk, size_t total, bool both_ways) {
  MeshOptions options;
  options.hosts = 2;
  options.streams = streams;
  Mesh a(options);
  options.host = 1;
  Mesh b(options);
  join(&a, &b, streams);
  const size_t count = total / chunk;
  const Block a_out = block(total);
  const Block a_in = block(total);
  const Block b_out = block(total);
  const Block b_in = block(total);
  const int rounds = total >= 16 * kMiB ? 8 : 2000;
  const double seconds = median_s(5, [&] {
    std::thread other([&] { drive(&b, 0, both_ways, true, b_out.get(), b_in.get(), chunk, count, rounds); });
    drive(&a, 1, true, both_ways, a_out.get(), a_in.get(), chunk, count, rounds);
    other.join();
  });
  char what[96];
  std::snprintf(what, sizeof what, "mesh %s, %d streams, %zu x %zu KiB", both_ways ? "both ways" : "one way", streams,
                count, chunk >> 10);
  const double bytes = static_cast<double>(total) * (both_ways ? 2 : 1);
  line(what, bytes, seconds / rounds);
}

}  // namespace

int main(int argc, char** argv) {
  const auto wanted = [&](const char* name) { return argc < 2 || std::strcmp(argv[1], name) == 0; };
  if (wanted("kernels")) bench_kernels();
  if (wanted("reduce")) {
    for (const int ranks : {2, 4}) {
      for (const int threads : {1, 2}) bench_reduce(ranks, 64 * kMiB, threads);
      bench_reduce(ranks, kMiB, 1);
      bench_reduce(ranks, kMiB / 16, 1);
    }
  }
  if (wanted("crc")) bench_crc();
  if (wanted("mesh")) {
    for (const int streams : {1, 4}) {
      bench_mesh(streams, 512 << 10, 64 * kMiB, false);
      bench_mesh(streams, 512 << 10, 64 * kMiB, true);
      bench_mesh(streams, 4 << 10, 4 << 10, true);
    }
  }
}
