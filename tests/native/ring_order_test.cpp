// The order of rings from measured bandwidths.
#include "collective/ring_order.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include "harness.h"

namespace bagua::collective {
namespace {

Bandwidths uniform(int hosts, double rate) {
  return Bandwidths(static_cast<size_t>(hosts), std::vector<double>(static_cast<size_t>(hosts), rate));
}

void set(Bandwidths* rates, int a, int b, double rate) {
  (*rates)[static_cast<size_t>(a)][static_cast<size_t>(b)] = rate;
  (*rates)[static_cast<size_t>(b)][static_cast<size_t>(a)] = rate;
}

Bandwidths random_rates(int hosts, std::mt19937* random) {
  std::uniform_real_distribution<double> exponent(0, 4);
  Bandwidths rates = uniform(hosts, 0);
  for (auto& row : rates) {
    for (double& rate : row) rate = 1e6 * std::pow(10.0, exponent(*random));
  }
  return rates;
}

std::vector<double> links(const Bandwidths& rates, const std::vector<int>& ring) {
  std::vector<double> found;
  for (size_t i = 0; i < ring.size(); ++i) {
    const auto a = static_cast<size_t>(ring[i]), b = static_cast<size_t>(ring[(i + 1) % ring.size()]);
    found.push_back(std::min(rates[a][b], rates[b][a]));
  }
  return found;
}

double slowest(const Bandwidths& rates, const std::vector<int>& ring) {
  const std::vector<double> found = links(rates, ring);
  return *std::min_element(found.begin(), found.end());
}

double cost(const Bandwidths& rates, const std::vector<int>& ring) {
  double sum = 0;
  for (const double rate : links(rates, ring)) sum += 1 / rate;
  return sum;
}

std::vector<int> plain(int hosts) {
  std::vector<int> ring(static_cast<size_t>(hosts));
  std::iota(ring.begin(), ring.end(), 0);
  return ring;
}

void check_ring(const Bandwidths& rates, const RingOrder& result) {
  std::vector<int> sorted = result.order;
  std::sort(sorted.begin(), sorted.end());
  CHECK(sorted == plain(static_cast<int>(rates.size())));
  CHECK_EQ(result.order.front(), 0);
  CHECK_EQ(result.slowest, slowest(rates, result.order));
}

bool neighbours(const std::vector<int>& ring, int a, int b) {
  for (size_t i = 0; i < ring.size(); ++i) {
    const int x = ring[i], y = ring[(i + 1) % ring.size()];
    if ((x == a && y == b) || (x == b && y == a)) return true;
  }
  return false;
}

}  // namespace

TEST(equal_links_change_nothing) {
  std::mt19937 random(1);
  std::uniform_real_distribution<double> noise(1.0, kClearlyBetter);
  for (int hosts = 1; hosts <= 20; ++hosts) {
    for (int round = 0; round < 10; ++round) {
      Bandwidths rates = uniform(hosts, 0);
      for (auto& row : rates) {
        for (double& rate : row) rate = 1e9 * noise(random);
      }
      CHECK(best_ring(rates).order == plain(hosts));
    }
  }
}

TEST(one_slow_pair_is_avoided) {
  for (const int hosts : {4, 5, 8, 9, 16, 33}) {
    for (int a = 0; a < hosts; ++a) {
      Bandwidths rates = uniform(hosts, 1e9);
      rates[static_cast<size_t>(a)][static_cast<size_t>((a + 1) % hosts)] = 1e8;  // one direction
      const RingOrder result = best_ring(rates);
      check_ring(rates, result);
      CHECK(!neighbours(result.order, a, (a + 1) % hosts));
      CHECK_EQ(result.slowest, 1e9);
    }
  }
}

// Against all rings: the slowest link within the tolerance of the best, the sum within it of the best of those, and no
// such ring comes before.
TEST(exact_as_brute_force) {
  std::mt19937 random(2);
  for (int hosts = 4; hosts <= 8; ++hosts) {
    for (int round = 0; round < (hosts < 8 ? 40 : 5); ++round) {
      const Bandwidths rates = random_rates(hosts, &random);
      const RingOrder result = best_ring(rates);
      check_ring(rates, result);
      std::vector<std::vector<int>> rings;
      std::vector<int> ring = plain(hosts);
      do {
        rings.push_back(ring);
      } while (std::next_permutation(ring.begin() + 1, ring.end()));
      double best = 0;
      for (const auto& other : rings) best = std::max(best, slowest(rates, other));
      CHECK(result.slowest >= best / kClearlyBetter * (1 - 1e-12));
      double least = INFINITY;
      for (const auto& other : rings) {
        if (slowest(rates, other) * kClearlyBetter >= best) least = std::min(least, cost(rates, other));
      }
      CHECK(cost(rates, result.order) <= least * kClearlyBetter * (1 + 1e-12));
      for (const auto& other : rings) {
        if (other == result.order) break;
        const bool as_good =
            slowest(rates, other) * kClearlyBetter >= best && cost(rates, other) <= least * kClearlyBetter;
        CHECK(!as_good);
      }
    }
  }
}

TEST(many_hosts_are_never_made_worse) {
  std::mt19937 random(3);
  for (const int hosts : {9, 12, 24, 40}) {
    for (int round = 0; round < 10; ++round) {
      const Bandwidths rates = random_rates(hosts, &random);
      const RingOrder result = best_ring(rates);
      check_ring(rates, result);
      CHECK(result.slowest >= slowest(rates, plain(hosts)));
      CHECK(result.order[1] < result.order.back());
    }
  }
}

// Hosts of several racks, dealt like cards: a ring crosses between racks only as often as there are racks.
TEST(racks_are_kept_together) {
  for (const int hosts : {8, 12, 32, 60}) {
    for (const int racks : {2, 4}) {
      Bandwidths rates = uniform(hosts, 1e8);
      for (int a = 0; a < hosts; ++a) {
        for (int b = a + racks; b < hosts; b += racks) set(&rates, a, b, 1e9);
      }
      const RingOrder result = best_ring(rates);
      check_ring(rates, result);
      const std::vector<double> found = links(rates, result.order);
      CHECK_EQ(std::count(found.begin(), found.end(), 1e8), racks);
    }
  }
}

TEST(useless_figures_are_survived) {
  for (const int hosts : {5, 11}) check_ring(uniform(hosts, 1), best_ring(uniform(hosts, 1)));
  CHECK(best_ring(uniform(6, 0)).order == plain(6));
  CHECK(best_ring(uniform(10, 0)).order == plain(10));
  CHECK(best_ring({}).order.empty());
}

}  // namespace bagua::collective
