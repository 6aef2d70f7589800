// All-reduce: reduce inside each host, ring reduce-scatter and ring all-gather between hosts; a host is one ring
// member.
//
// The vector is cut into one block per host. In step s of the reduce-scatter, host h sends its partial result of block
// h - s to h + 1 and gets that of block h - s - 1 from h - 1; its own ranks' contributions and the incoming partial are
// added in one pass. After hosts - 1 steps, block h + 1 is final at host h: written to every local rank and passed on.
// 2 (hosts - 1) / hosts of the vector cross each link, whatever the number of ranks.
//
// Partial results lie in the first local rank's dst. That is safe in place: a host's own contribution to a block has
// been read, and has left the host, before the final block can come back. AVG divides in the last addition alone.
#include "collective/builder.h"

namespace bagua::collective {

namespace {

constexpr size_t kWindow = 8;  // incoming partials that may wait for their addition

// Vectors up to this size go to all hosts at once, and all compute the result: one trip instead of 2 (hosts - 1).
constexpr uint64_t kDirectBytes = 32 * 1024;
constexpr int kDirectHosts = 8;

Range block_of(uint64_t count, int hosts, int block) {
  const uint64_t n = static_cast<uint64_t>(hosts), b = static_cast<uint64_t>((block % hosts + hosts) % hosts);
  const uint64_t size = count / n, rest = count % n;
  return {b * size + std::min(b, rest), size + (b < rest ? 1 : 0)};
}

void build_direct(Builder* b) {
  const uint64_t count = b->request().count;
  std::vector<Ref> partials;
  for (int h = 0; h < b->hosts(); ++h) partials.push_back(b->scratch(count * b->element()));
  const Ref own = partials[static_cast<size_t>(b->host())];
  const StepId local = b->reduce(b->all_src(0), {own}, count, false);
  const StepId last = b->reduce(partials, b->all_dst(0), count, true, {local});
  for (int o = 1; o < b->hosts(); ++o) {
    const int peer = (b->host() + o) % b->hosts();
    b->send(peer, own, count, {local});
    b->depend(last, b->recv(peer, partials[static_cast<size_t>(peer)], count));
  }
}

// Ring reduce-scatter; `ready[k]` is set to the step that makes chunk k of block host + 1 final.
void build_ring_reduce(Builder* b, std::vector<StepId>* ready) {
  const int hosts = b->hosts(), host = b->host();
  const int next = (host + 1) % hosts, prev = (host + hosts - 1) % hosts;
  const uint64_t count = b->request().count;
  for (const Range& chunk : b->chunks(block_of(count, hosts, host))) {
    if (b->locals() == 1) {
      b->send(next, b->src(0, chunk.begin), chunk.count);
    } else {
      const StepId sum = b->reduce(b->all_src(chunk.begin), {b->dst(0, chunk.begin)}, chunk.count, false);
      b->send(next, b->dst(0, chunk.begin), chunk.count, {sum});
    }
  }
  Window window(b, kWindow, b->chunk_bytes());
  for (int s = 0; s < hosts - 1; ++s) {
    const bool last = s == hosts - 2;
    for (const Range& chunk : b->chunks(block_of(count, hosts, host - s - 1))) {
      StepId free_after;
      const Ref place = window.take(&free_after);
      const StepId arrived = b->recv(prev, place, chunk.count, {free_after});
      std::vector<Ref> sources = b->all_src(chunk.begin);
      sources.push_back(place);
      const std::vector<Ref> targets = last ? b->all_dst(chunk.begin) : std::vector<Ref>{b->dst(0, chunk.begin)};
      const StepId sum = b->reduce(sources, targets, chunk.count, last, {arrived});
      window.release_after(sum);
      if (last) {
        ready->push_back(sum);
      } else {
        b->send(next, b->dst(0, chunk.begin), chunk.count, {sum});
      }
    }
  }
}

// Ring all-gather of final blocks, in place in the first local rank's dst and copied to the others' from there.
void build_ring_gather(Builder* b, std::vector<StepId> ready) {
  const int hosts = b->hosts(), host = b->host();
  const int next = (host + 1) % hosts, prev = (host + hosts - 1) % hosts;
  const uint64_t count = b->request().count;
  for (int s = 0; s < hosts - 1; ++s) {
    size_t k = 0;
    for (const Range& chunk : b->chunks(block_of(count, hosts, host + 1 - s))) {
      b->send(next, b->dst(0, chunk.begin), chunk.count, {ready[k++]});
    }
    ready.clear();
    for (const Range& chunk : b->chunks(block_of(count, hosts, host - s))) {
      const StepId arrived = b->recv(prev, b->dst(0, chunk.begin), chunk.count);
      if (b->locals() > 1) b->copy(b->dst(0, chunk.begin), b->all_dst(chunk.begin, 0), chunk.count, {arrived});
      ready.push_back(arrived);
    }
  }
}

}  // namespace

void build_all_reduce(Builder* b) {
  const uint64_t count = b->request().count;
  if (b->hosts() == 1) {
    for (const Range& chunk : b->chunks({0, count})) {
      b->reduce(b->all_src(chunk.begin), b->all_dst(chunk.begin), chunk.count, true);
    }
  } else if (count * b->element() <= std::min<uint64_t>(kDirectBytes, b->chunk_bytes()) && b->hosts() <= kDirectHosts) {
    build_direct(b);
  } else {
    std::vector<StepId> ready;
    build_ring_reduce(b, &ready);
    build_ring_gather(b, std::move(ready));
  }
}

}  // namespace bagua::collective
