// Chooses the cheapest pattern of an all-reduce between hosts, by a cost model with two constants.
//
// The constants are the cost of a trip (one message from host to host, wake-ups included) and of a byte that leaves a
// host. With n hosts and s bytes, in units of one trip and of s bytes:
//
//   pattern            trips                       bytes
//   direct             1                           n - 1
//   halving-doubling   2 log2(n)                   2 (n - 1) / n
//     n no power of 2  2 floor(log2(n)) + 2        + 2
//   ring               2 (n - 1)                   2 (n - 1) / n
//
// (R. Thakur, R. Rabenseifner, W. Gropp: Optimization of collective communication operations in MPICH, IJHPCA 2005.)
// All hosts must choose the same, so the constants are fixed, not measured: they stand for one socket of 10 Gbit/s with
// queues of tens of microseconds. Only the product of delay and bandwidth matters, and it is similar on slower and
// longer wires: 1 Gbit/s with 1 ms, 100 Mbit/s with 10 ms.
#pragma once

#include <cstdint>

namespace bagua::collective {

enum class Pattern : uint8_t { kDirect, kHalvingDoubling, kRing };

constexpr double kTripNs = 100'000;
constexpr double kByteNs = 1.0;
// Longer vectors always take the ring: only the ring works on all parts of the vector at once.
constexpr uint64_t kMiddleBytes = 512 * 1024;
// Up to this size the cost of bytes is neglected. With more hosts than kDirectHosts, direct exchanges could overflow
// the receivers' queues.
constexpr uint64_t kDirectBytes = 32 * 1024;
constexpr int kDirectHosts = 8;

Pattern cheapest_pattern(int hosts, uint64_t bytes);

}  // namespace bagua::collective
