// An operation of NCCL's between two ranks: its proxies carry it out. Played here: the GPUs, threads that fill and
// empty the proxies' buffers by the rules of NCCL's kernels.
#pragma once

#include <atomic>
#include <cstdint>

#include "nccl_net/real_nccl/world.h"

namespace bagua::nccl_net::real {

struct Operation {
  int protocol;
  int slice_steps;
  int chunk_steps;
  int slices;
  uint32_t seed;
  int size = -1;  // of each slice; -1: at random, and the bytes are checked
};

template <class T>
T load(const T* from) {
  return __atomic_load_n(from, __ATOMIC_ACQUIRE);
}

// Contents of a slice, which depend on its key and on their place in it.
void fill(char* data, size_t size, uint64_t key);

// The sending GPU.
void play_sender(const Channel& channel, int number, const Operation& operation);

// Work of a proxy's thread for an operation.
Object proxy_args(const std::vector<Channel>& channels, const Operation& operation, End Channel::* end);

// Carries an operation out: a thread for each rank's proxy, and for each GPU's side of a channel. Returns the seconds.
double run(const Nccl& nccl, World* world, const Operation& operation, std::atomic<int>* wrong);

}  // namespace bagua::nccl_net::real
