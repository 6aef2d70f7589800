// Orders the hosts of a ring by measured bandwidths, so that the slowest link is as fast as possible.
#pragma once

#include <vector>

namespace bagua::collective {

// Bandwidth of every pair in bytes per second: [a][b] is from host a to host b.
using Bandwidths = std::vector<std::vector<double>>;

// A ring of all hosts and the bandwidth of its slowest link.
struct RingOrder {
  std::vector<int> order;  // a permutation of the hosts; begins with host 0
  double slowest = 0;      // bytes per second of its slowest link
};

// 0, 1, 2, ...
std::vector<int> plain_order(int hosts);

// Bandwidths that differ by less than this factor count as equal, so that noise does not reorder hosts.
constexpr double kClearlyBetter = 1.2;

// Finds the ring whose slowest link is fastest; among equals the least sum of 1/bandwidth, then the lexicographically
// first. So the result is 0, 1, 2, ... unless another ring is clearly better. A pair counts with the slower of its two
// directions. `rates` is square. Exact for at most 8 hosts. For more hosts it uses the greedy edge heuristic for the
// travelling salesman and 2-opt exchanges (Johnson and McGeoch 1997, "The Traveling Salesman Problem: A Case Study in
// Local Optimization"), and keeps 0, 1, 2, ... unless the ring found is clearly better.
RingOrder best_ring(const Bandwidths& rates);

}  // namespace bagua::collective
