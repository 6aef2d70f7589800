// All-reduces of short vectors between hosts, where latency costs more than bytes.
//
// A cost model with two constants finds the cheapest pattern: the cost of a trip (one message from host to host,
// wake-ups included) and of a byte that leaves a host. With n hosts and s bytes, in units of one trip and of s bytes:
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
#include "collective/builder.h"

namespace bagua::collective {

namespace {

constexpr double kTripNs = 100'000;
constexpr double kByteNs = 1.0;
// Longer vectors always take the ring: only the ring works on all parts of the vector at once.
constexpr uint64_t kMiddleBytes = 512 * 1024;
// Up to this size the cost of bytes is neglected. With more hosts than kDirectHosts, direct exchanges could overflow
// the receivers' queues.
constexpr uint64_t kDirectBytes = 32 * 1024;
constexpr int kDirectHosts = 8;

}  // namespace

Pattern cheapest_pattern(int hosts, uint64_t bytes) {
  if (hosts <= kDirectHosts && bytes <= kDirectBytes) return Pattern::kDirect;
  if (bytes > kMiddleBytes) return Pattern::kRing;
  const double n = hosts, moved = static_cast<double>(bytes) * kByteNs, least = 2 * (n - 1) / n * moved;
  int rounds = 0;
  while (2 << rounds <= hosts) ++rounds;
  const bool power = 1 << rounds == hosts;
  const double direct = hosts <= kDirectHosts ? kTripNs + (n - 1) * moved : 1e300;
  const double halving = 2 * rounds * kTripNs + least + (power ? 0 : 2 * (kTripNs + moved));
  const double ring = 2 * (n - 1) * kTripNs + least;
  if (direct <= halving && direct <= ring) return Pattern::kDirect;
  return halving <= ring ? Pattern::kHalvingDoubling : Pattern::kRing;
}

// One trip: each host sends its partial result to all others, and all add the partials in the same order.
void build_direct(Builder* b, Range range) {
  const auto own = static_cast<size_t>(b->host());
  std::vector<Ref> partials(static_cast<size_t>(b->hosts()));
  StepId local = kNoStep;
  if (b->locals() == 1) {
    partials[own] = b->src(0, range.begin);
  } else {
    partials[own] = b->scratch(range.count * b->element());
    local = b->reduce(b->all_src(range.begin), {partials[own]}, range.count, false);
  }
  std::vector<StepId> before{local};
  for (const int peer : b->others()) {
    Ref& place = partials[static_cast<size_t>(peer)];
    place = b->scratch(range.count * b->element());
    before.push_back(b->send(peer, partials[own], range.count, {local}));  // in place, the result would overwrite it
    before.push_back(b->recv(peer, place, range.count));
  }
  const StepId sum = b->reduce(partials, b->all_dst(range.begin), range.count, true);
  for (const StepId step : before) b->depend(sum, step);
}

namespace {

// Recursive halving, then doubling, among the largest power of two of hosts. The surplus hosts are one each of the
// first pairs (0, 1), (2, 3), ...: each gives its partial to the other host of its pair first, and gets the result at
// the end. Partials lie in the first local rank's dst.
class HalvingDoubling {
 public:
  HalvingDoubling(Builder* b, Range range) : b_(b), whole_(range), owned_(range) {
    while (2 * members_ <= b->hosts()) members_ *= 2;
    pairs_ = b->hosts() - members_;
  }

  void build() {
    latest_ = {b_->reduce(b_->all_src(whole_.begin), {place(whole_)}, whole_.count, false)};
    const int host = b_->host();
    const bool paired = host < 2 * pairs_;
    if (paired && host % 2 == 1) {
      const StepId sent = send(host - 1, whole_);
      latest_ = {b_->recv(host - 1, place(whole_), whole_.count, {sent})};
    } else {
      member_ = paired ? host / 2 : host - pairs_;
      if (paired) add(host + 1, whole_, false);
      for (int distance = members_ / 2; distance >= 1; distance /= 2) halve(distance);
      for (auto round = rounds_.rbegin(); round != rounds_.rend(); ++round) double_up(*round);
      if (paired) send(host + 1, whole_);
    }
    if (b_->locals() == 1) return;
    const StepId copied = b_->copy(place(whole_), b_->all_dst(whole_.begin, 0), whole_.count);
    for (const StepId step : latest_) b_->depend(copied, step);
  }

 private:
  struct Round {
    int peer;
    Range given;
    StepId sent;
  };

  Ref place(Range part) const { return b_->dst(0, part.begin); }
  int host_of(int member) const { return member < pairs_ ? 2 * member : member + pairs_; }

  StepId send(int peer, Range part) {
    if (part.count == 0) return kNoStep;
    const StepId sent = b_->send(peer, place(part), part.count);
    for (const StepId step : latest_) b_->depend(sent, step);
    return sent;
  }

  // Receives the partial of `peer` and adds it.
  void add(int peer, Range part, bool final) {
    if (part.count == 0) return;
    const Ref incoming = b_->scratch(part.count * b_->element());
    const StepId arrived = b_->recv(peer, incoming, part.count);
    const StepId sum = b_->reduce({place(part), incoming}, {place(part)}, part.count, final, {arrived});
    for (const StepId step : latest_) b_->depend(sum, step);
    latest_ = {sum};
  }

  void halve(int distance) {
    const uint64_t half = owned_.count / 2;
    Range kept{owned_.begin, half}, given{owned_.begin + half, owned_.count - half};
    if (member_ & distance) std::swap(kept, given);
    const int peer = host_of(member_ ^ distance);
    rounds_.push_back({peer, given, send(peer, given)});
    add(peer, kept, distance == 1);
    owned_ = kept;
  }

  // Both parts are final now: sends `owned_` to the peer of that round, and receives the part that the peer owns.
  void double_up(const Round& round) {
    send(round.peer, owned_);
    if (round.given.count > 0) {
      latest_.push_back(b_->recv(round.peer, place(round.given), round.given.count, {round.sent}));
    }
    owned_ = {std::min(owned_.begin, round.given.begin), owned_.count + round.given.count};
  }

  Builder* const b_;
  const Range whole_;
  int members_ = 1, pairs_ = 0, member_ = 0;
  Range owned_;
  std::vector<StepId> latest_;  // steps that `owned_` has to wait for
  std::vector<Round> rounds_;
};

}  // namespace

void build_halving_doubling(Builder* b, Range range) {
  HalvingDoubling(b, range).build();
}

}  // namespace bagua::collective
