#include "collective/ring_order.h"

#include <algorithm>
#include <numeric>
#include <tuple>
#include <utility>

namespace bagua::collective {

std::vector<int> plain_order(int hosts) {
  std::vector<int> order(static_cast<size_t>(hosts));
  std::iota(order.begin(), order.end(), 0);
  return order;
}

namespace {

constexpr int kExactHosts = 8;

struct Quality {
  double slowest;  // bytes per second
  double cost;     // sum of 1/bandwidth
};

// Bandwidth of each pair of hosts: that of the slower direction, never zero.
class Pairs {
 public:
  explicit Pairs(const Bandwidths& rates) : rates_(rates) {}
  int hosts() const { return static_cast<int>(rates_.size()); }
  double operator()(int a, int b) const { return std::max(1.0, std::min(at(a, b), at(b, a))); }

 private:
  double at(int a, int b) const { return rates_[static_cast<size_t>(a)][static_cast<size_t>(b)]; }
  const Bandwidths& rates_;
};

Quality quality_of(const Pairs& pairs, const std::vector<int>& ring) {
  Quality quality{pairs(ring.back(), ring.front()), 1 / pairs(ring.back(), ring.front())};
  for (size_t i = 1; i < ring.size(); ++i) {
    const double rate = pairs(ring[i - 1], ring[i]);
    quality.slowest = std::min(quality.slowest, rate);
    quality.cost += 1 / rate;
  }
  return quality;
}

// Calls visit(ring, quality) for every ring, once per direction, in lexicographic order.
template <class F>
void each_ring(const Pairs& pairs, F visit) {
  std::vector<int> ring = plain_order(pairs.hosts());
  do {
    if (!visit(ring, quality_of(pairs, ring))) return;
  } while (std::next_permutation(ring.begin() + 1, ring.end()));
}

std::vector<int> exact(const Pairs& pairs) {
  double slowest = 0, cost = -1;
  each_ring(pairs, [&](const std::vector<int>&, const Quality& quality) {
    slowest = std::max(slowest, quality.slowest);
    return true;
  });
  const auto fast = [&slowest](const Quality& quality) { return quality.slowest * kClearlyBetter >= slowest; };
  each_ring(pairs, [&](const std::vector<int>&, const Quality& quality) {
    if (fast(quality) && (cost < 0 || quality.cost < cost)) cost = quality.cost;
    return true;
  });
  std::vector<int> best;
  each_ring(pairs, [&](const std::vector<int>& ring, const Quality& quality) {
    if (fast(quality) && quality.cost <= cost * kClearlyBetter) best = ring;
    return best.empty();
  });
  return best;
}

struct Link {
  double rate;
  int a, b;
};

// Takes the fastest links first. Skips a link that would be the third of a host, or would close a ring without all
// hosts.
std::vector<int> greedy(const Pairs& pairs) {
  const int hosts = pairs.hosts();
  std::vector<Link> links;
  for (int a = 0; a < hosts; ++a) {
    for (int b = a + 1; b < hosts; ++b) links.push_back({pairs(a, b), a, b});
  }
  std::stable_sort(links.begin(), links.end(), [](const Link& x, const Link& y) { return x.rate > y.rate; });
  std::vector<std::vector<int>> next(static_cast<size_t>(hosts));
  std::vector<int> path = plain_order(hosts);  // by host: number of the path that it is on
  for (const Link& link : links) {
    auto &at_a = next[static_cast<size_t>(link.a)], &at_b = next[static_cast<size_t>(link.b)];
    const int from = path[static_cast<size_t>(link.b)], to = path[static_cast<size_t>(link.a)];
    if (at_a.size() == 2 || at_b.size() == 2 || from == to) continue;
    at_a.push_back(link.b);
    at_b.push_back(link.a);
    std::replace(path.begin(), path.end(), from, to);
  }
  // One path is left: walks from one end to the other.
  int at = 0, before = -1;
  while (next[static_cast<size_t>(at)].size() == 2) ++at;
  std::vector<int> ring;
  while (at >= 0) {
    ring.push_back(at);
    int onward = -1;
    for (const int other : next[static_cast<size_t>(at)]) {
      if (other != before) onward = other;
    }
    before = std::exchange(at, onward);
  }
  return ring;
}

// 2-opt: reverses a part of the ring as long as this replaces two links by better ones. Each exchange makes the sorted
// list of the ring's bandwidths lexicographically larger, so the loop ends.
void improve(const Pairs& pairs, std::vector<int>* ring) {
  const size_t n = ring->size();
  bool changed = true;
  while (changed) {
    changed = false;
    for (size_t i = 0; i + 2 < n; ++i) {
      for (size_t j = i + 2; j < n; ++j) {
        if (i == 0 && j == n - 1) continue;  // neighbours
        const int a = (*ring)[i], b = (*ring)[i + 1], c = (*ring)[j], d = (*ring)[(j + 1) % n];
        const auto old_links = std::minmax({pairs(a, b), pairs(c, d)});
        const auto new_links = std::minmax({pairs(a, c), pairs(b, d)});
        if (new_links <= old_links) continue;
        std::reverse(ring->begin() + static_cast<std::ptrdiff_t>(i) + 1,
                     ring->begin() + static_cast<std::ptrdiff_t>(j) + 1);
        changed = true;
      }
    }
  }
}

// Rewrites the ring to begin with host 0 and continue with the lower of its two neighbours.
void normalise(std::vector<int>* ring) {
  std::rotate(ring->begin(), std::find(ring->begin(), ring->end(), 0), ring->end());
  if ((*ring)[1] > ring->back()) std::reverse(ring->begin() + 1, ring->end());
}

std::vector<int> heuristic(const Pairs& pairs) {
  const std::vector<int> plain = plain_order(pairs.hosts());
  const Quality known = quality_of(pairs, plain);
  std::vector<int> best = plain;
  Quality best_quality = known;
  for (std::vector<int> ring : {plain, greedy(pairs)}) {
    improve(pairs, &ring);
    const Quality quality = quality_of(pairs, ring);
    const bool better = quality.slowest > best_quality.slowest ||
                        (quality.slowest == best_quality.slowest && quality.cost < best_quality.cost);
    if (better) std::tie(best, best_quality) = std::make_pair(ring, quality);
  }
  if (best_quality.slowest <= known.slowest * kClearlyBetter && known.cost <= best_quality.cost * kClearlyBetter) {
    return plain;
  }
  normalise(&best);
  return best;
}

}  // namespace

RingOrder best_ring(const Bandwidths& rates) {
  const Pairs pairs(rates);
  if (pairs.hosts() < 2) return {plain_order(pairs.hosts()), 0};
  RingOrder result;
  result.order = pairs.hosts() < 4              ? plain_order(pairs.hosts())
                 : pairs.hosts() <= kExactHosts ? exact(pairs)
                                                : heuristic(pairs);
  result.slowest = quality_of(pairs, result.order).slowest;
  return result;
}

}  // namespace bagua::collective
