// The plugin driven as NCCL drives it: through a table, on loopback, both ends in one process.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "harness.h"
#include "nccl_net/nccl_net_abi.h"

namespace bagua::nccl_net::rig {

// Both ends of one connection, and the listener that it came from.
struct Pair {
  void* listener = nullptr;
  void* sender = nullptr;
  void* receiver = nullptr;
};

// The table of version 11, initialised for loopback, or the one that was given to use().
const NetV11& net();
void use(const NetV11* table);  // nullptr: this program's own
Pair connected();
// Calls connect and accept in turn until both ends are there.
void meet(void* handle, Pair* pair, int seconds = 30);
void close(Pair* pair);

// Bytes that depend on their place and on `seed`.
std::vector<uint8_t> pattern(size_t size, uint64_t seed);

// Calls test() until the request is done or fails; the reported size goes to *size. Fails the test after `seconds`.
Result finish(void* request, int* size = nullptr, int seconds = 30);
// Begins until the plugin takes it.
void* send(const Pair& pair, const void* data, size_t size);
void* receive(const Pair& pair, void* data, size_t size);

// Lines that were logged as warnings since the last call.
std::vector<std::string> warnings();
// Open descriptors and threads of this process.
size_t open_descriptors();
size_t thread_count();

}  // namespace bagua::nccl_net::rig
