// Chooses the cheapest pattern of an all-reduce between hosts, by a cost model of two constants.
//
// A trip is one message from a host to another with all that it wakes up; a byte is what leaves (and enters) a host.
// With n hosts and s bytes, in units of one trip and of s bytes:
//
//   pattern            trips                       bytes
//   direct             1                           n - 1
//   halving-doubling   2 log2(n)                   2 (n - 1) / n
//     n no power of 2  2 floor(log2(n)) + 2        + 2
//   ring               2 (n - 1)                   2 (n - 1) / n
//
// (R. Thakur, R. Rabenseifner, W. Gropp: Optimization of collective communication operations in MPICH, IJHPCA 2005.)
// All hosts must choose the same, so nothing here is measured: the constants stand for one socket of 10 Gbit/s with
// queues of tens of microseconds. On slower wires and longer ones the product of delay and bandwidth, which alone
// decides, lies near theirs: 1 Gbit/s with 1 ms, 100 Mbit/s with 10 ms.
#pragma once

#include <cstdint>

namespace bagua::collective {

enum class Pattern : uint8_t { kDirect, kHalvingDoubling, kRing };

constexpr double kTripNs = 100'000;
constexpr double kByteNs = 1.0;
// Longer ones always take the ring, which alone works on all parts of the vector at once.
constexpr uint64_t kMiddleBytes = 512 * 1024;
// Up to here the bytes do not count; with more hosts than that, direct exchanges would flood the receivers' queues.
constexpr uint64_t kDirectBytes = 32 * 1024;
constexpr int kDirectHosts = 8;

Pattern cheapest_pattern(int hosts, uint64_t bytes);

}  // namespace bagua::collective
