// An operation of NCCL's between two ranks: its proxies carry it out. Played here: the GPUs, threads that fill and
// empty the proxies' buffers by the rules of NCCL's kernels.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <random>
#include <thread>

#include "nccl_net/real_nccl/world.h"

namespace bagua::nccl_net::real {

struct Operation {
  int protocol;
  int slice_steps;
  int chunk_steps;
  int slices;
  uint32_t seed;
};

template <class T>
T load(const T* from) {
  return __atomic_load_n(from, __ATOMIC_ACQUIRE);
}

// Eight bytes of a slice's contents, which depend on the slice and on their place in it.
inline uint64_t contents(uint64_t key, size_t place) {
  return (key + place + 1) * 0x9e3779b97f4a7c15;
}

inline uint64_t begin_of(const Operation& operation, const Channel& channel) {
  const auto chunk = static_cast<uint64_t>(operation.chunk_steps);
  return (channel.step + chunk - 1) / chunk * chunk;
}

// The sizes of a channel's slices: half of them small, some empty, some full.
inline std::vector<int> sizes_of(const Operation& operation, int channel) {
  const int full = operation.slice_steps * (kBufferSizes[operation.protocol] / kSteps);
  std::minstd_rand random(operation.seed + static_cast<uint32_t>(channel));
  std::vector<int> sizes(static_cast<size_t>(operation.slices));
  for (int& size : sizes) {
    const uint32_t kind = random() % 16;
    const uint32_t value = random();
    size = kind == 0   ? 0
           : kind == 1 ? full
           : kind < 9  ? static_cast<int>(value % 4096)
           : kind < 13 ? static_cast<int>(value % 65536)
                       : static_cast<int>(value % static_cast<uint32_t>(full));
    if (operation.protocol == kLl) size -= size % 16;
  }
  return sizes;
}

inline uint64_t key_of(uint64_t step, int channel) {
  return step * 0x2545f4914f6cdd1d + static_cast<uint64_t>(channel);
}

inline bool filled(const char* data, size_t size, uint64_t key) {
  bool same = true;
  for (size_t at = 0; at < size; at += 8) {
    const uint64_t word = contents(key, at);
    same &= std::memcmp(data + at, &word, std::min<size_t>(8, size - at)) == 0;
  }
  return same;
}

// LL: four bytes of data and a flag, written and read as one, so that the flag says that the data is there.
inline uint64_t ll_word(uint64_t key, size_t place, uint32_t flag) {
  return contents(key, place) >> 32 | static_cast<uint64_t>(flag) << 32;
}

template <class T>
inline void store(T* to, T value) {
  __atomic_store_n(to, value, __ATOMIC_RELEASE);
}

// The receiving GPU. Slices that came wrong are counted.
inline void play_receiver(const Channel& channel, int number, const Operation& operation, std::atomic<int>* wrong) {
  const End& end = channel.receiver;
  const std::vector<int> sizes = sizes_of(operation, number);
  uint64_t step = begin_of(operation, channel);
  for (size_t i = 0; i < sizes.size(); ++i, step += operation.slice_steps) {
    const char* data = end.slot(operation.protocol, step);
    const auto size = static_cast<size_t>(sizes[i]);
    const uint64_t key = key_of(step, number);
    bool good = true;
    if (operation.protocol == kLl) {
      // As in NCCL's kernels, the flags alone say what has come; the proxy may not have noticed yet.
      const auto* words = reinterpret_cast<const uint64_t*>(data);
      const auto flag = static_cast<uint32_t>(step + 1);
      for (size_t k = 0; k < size / 8; ++k) {
        uint64_t word = load(&words[k]);
        for (; word >> 32 != flag; word = load(&words[k])) ::sched_yield();
        good &= word == ll_word(key, k, flag);
      }
    } else {
      while (load(end.tail()) <= step) ::sched_yield();
      good = filled(data, size, key);
    }
    if (!good) wrong->fetch_add(1);
    store(end.head(), step + operation.slice_steps);
  }
}

// Contents of a slice, which depend on its key and on their place in it.
inline void fill(char* data, size_t size, uint64_t key) {
  for (size_t at = 0; at < size; at += 8) {
    const uint64_t word = contents(key, at);
    std::memcpy(data + at, &word, std::min<size_t>(8, size - at));
  }
}

// The sending GPU.
inline void play_sender(const Channel& channel, int number, const Operation& operation) {
  const End& end = channel.sender;
  const std::vector<int> sizes = sizes_of(operation, number);
  uint64_t step = begin_of(operation, channel);
  for (size_t i = 0; i < sizes.size(); ++i, step += operation.slice_steps) {
    while (load(end.head()) + kSteps < step + operation.slice_steps) ::sched_yield();
    char* data = end.slot(operation.protocol, step);
    const auto size = static_cast<size_t>(sizes[i]);
    const uint64_t key = key_of(step, number);
    if (operation.protocol == kLl) {
      store(end.fifo_size(step), static_cast<int64_t>(size));
      auto* words = reinterpret_cast<uint64_t*>(data);
      const auto flag = static_cast<uint32_t>(step + 1);
      for (size_t k = 0; k < size / 8; ++k) store(&words[k], ll_word(key, k, flag));
      continue;
    }
    fill(data, size, key);
    store(end.fifo_size(step), static_cast<int64_t>(size));
    store(end.tail(), step + operation.slice_steps);
  }
}

// Work of a proxy's thread for an operation.
inline Object proxy_args(const std::vector<Channel>& channels, const Operation& operation, End Channel::* end) {
  Object made = zeroed(args::kSize);
  void* const args = made.get();
  for (int i = 0; i < kChannels; ++i) {
    sub::connection(args, i) = (channels[i].*end).connection();
    sub::channelId(args, i) = i;
    sub::nsteps(args, i) = operation.slices * operation.slice_steps;
    sub::nbytes(args, i) = 1 << 20;
    sub::groupSize(args, i) = 1;
  }
  args::nsubs(args) = kChannels;
  args::sliceSteps(args) = operation.slice_steps;
  args::chunkSteps(args) = operation.chunk_steps;
  args::collAPI(args) = kAllReduce;
  args::protocol(args) = static_cast<uint8_t>(operation.protocol);
  args::algorithm.set(args, kRing);
  args::state(args) = kOpReady;
  args::nChannels.set(args, kChannels);
  args::nPeers.set(args, 1);
  return made;
}

// Carries an operation out: a thread for each rank's proxy, and for each GPU's side of a channel.
inline void run(const Nccl& nccl, World* world, const Operation& operation, std::atomic<int>* wrong) {
  std::vector<std::thread> threads;
  for (int i = 0; i < kChannels; ++i) {
    threads.emplace_back([=] { play_sender(world->channels[i], i, operation); });
    threads.emplace_back([=] { play_receiver(world->channels[i], i, operation, wrong); });
  }
  const auto progress = [&](const TransportComm& calls, int rank, End Channel::* end) {
    const Object args = proxy_args(world->channels, operation, end);
    while (args::state(args.get()) != kOpNone) {
      must(calls.proxyProgress(world->state(rank), args.get()), rank == 0 ? "sendProxyProgress" : "recvProxyProgress");
      if (args::idle(args.get()) != 0) ::sched_yield();
    }
  };
  threads.emplace_back([&] { progress(nccl.transport.send, 0, &Channel::sender); });
  threads.emplace_back([&] { progress(nccl.transport.recv, 1, &Channel::receiver); });
  for (std::thread& each : threads) each.join();
  for (Channel& each : world->channels) {
    each.step = begin_of(operation, each) + static_cast<uint64_t>(operation.slices * operation.slice_steps);
  }
}

}  // namespace bagua::nccl_net::real
