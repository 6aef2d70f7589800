// Orders the hosts of a ring so that its slowest link is as fast as possible, by measured bandwidths.
#pragma once

#include <vector>

namespace bagua::collective {

// Bandwidth of every pair, in bytes per second: [a][b] is what host a can send to host b.
using Bandwidths = std::vector<std::vector<double>>;

// A ring of all hosts and what its links carry.
struct RingOrder {
  std::vector<int> order;  // a permutation of the hosts; begins with host 0
  double slowest = 0;      // bytes per second of its slowest link
};

// Measured figures that differ by less than this factor count as equal: noise must not reorder hosts.
constexpr double kClearlyBetter = 1.2;

// The ring whose slowest link is fastest; among those the one with the least sum of 1/bandwidth; among those the
// lexicographically first, so 0, 1, 2, ... unless another is clearly better. A pair counts with the slower of its two
// directions. `rates` is square. Exact for at most 8 hosts. Above, a heuristic: the greedy edge heuristic for the
// travelling salesman and 2-opt exchanges (Johnson and McGeoch 1997, "The Traveling Salesman Problem: A Case Study in
// Local Optimization"), and 0, 1, 2, ... unless what they find is clearly better.
RingOrder best_ring(const Bandwidths& rates);

}  // namespace bagua::collective
