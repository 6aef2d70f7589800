// All-reduce: reduces inside each host, then between hosts. Between hosts, each host is one participant, however many
// ranks it has.
//
// Long vectors use the ring: ring reduce-scatter, then ring all-gather. The vector is cut into one block per host. In
// step s of the reduce-scatter, the host at place h of the ring sends its partial result of block h - s to h + 1, and
// receives that of block h - s - 1 from h - 1. One pass adds the received partial to the contributions of its own
// ranks. After hosts - 1 steps, block h + 1 is final at host h, which writes it to every local rank and passes it on.
// 2 (hosts - 1) / hosts of the vector cross each link.
//
// Partial results lie in the first local rank's dst. This works in place: a host's own contribution to a block has been
// read and sent before the final block can come back. AVG divides in the last addition only.
#include "collective/builder.h"

namespace bagua::collective {

namespace {

constexpr size_t kWindow = 8;  // received partials that can wait to be added

Range block_of(const Builder& b, Range range, int block) {
  const Range part = part_of(range.count, b.hosts(), block);
  return {range.begin + part.begin, part.count};
}

// Ring reduce-scatter. Sets `ready[k]` to the step that makes chunk k of block place + 1 final.
void build_ring_reduce(Builder* b, Range range, std::vector<StepId>* ready) {
  const int hosts = b->hosts(), place = b->place(), next = b->next(), prev = b->previous();
  for (const Range& chunk : b->chunks(block_of(*b, range, place))) {
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
    for (const Range& chunk : b->chunks(block_of(*b, range, place - s - 1))) {
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

// Ring all-gather of the final blocks, in the first local rank's dst; copies them to the dst of the other ranks.
void build_ring_gather(Builder* b, Range range, std::vector<StepId> ready) {
  const int hosts = b->hosts(), place = b->place(), next = b->next(), prev = b->previous();
  for (int s = 0; s < hosts - 1; ++s) {
    size_t k = 0;
    for (const Range& chunk : b->chunks(block_of(*b, range, place + 1 - s))) {
      b->send(next, b->dst(0, chunk.begin), chunk.count, {ready[k++]});
    }
    ready.clear();
    for (const Range& chunk : b->chunks(block_of(*b, range, place - s))) {
      const StepId arrived = b->recv(prev, b->dst(0, chunk.begin), chunk.count);
      if (b->locals() > 1) b->copy(b->dst(0, chunk.begin), b->all_dst(chunk.begin, 0), chunk.count, {arrived});
      ready.push_back(arrived);
    }
  }
}

}  // namespace

void build_plain(Builder* b, Range range) {
  const uint64_t bytes = range.count * b->element();
  Pattern pattern = cheapest_pattern(b->hosts(), bytes);
  if (bytes > b->chunk_bytes()) pattern = Pattern::kRing;  // the other patterns send the vector as one message
  if (pattern == Pattern::kDirect) return build_direct(b, range);
  if (pattern == Pattern::kHalvingDoubling) return build_halving_doubling(b, range);
  std::vector<StepId> ready;
  build_ring_reduce(b, range, &ready);
  build_ring_gather(b, range, std::move(ready));
}

void build_all_reduce(Builder* b) {
  const Request& request = b->request();
  const Range whole{0, request.count};
  if (b->hosts() == 1) {
    for (const Range& chunk : b->chunks(whole)) {
      b->reduce(b->all_src(chunk.begin), b->all_dst(chunk.begin), chunk.count, true);
    }
  } else if (request.encoding.codec == Codec::kNone) {
    build_plain(b, whole);
  } else {
    const uint64_t encoded = request.count - request.exact;
    if (request.exact > 0) build_plain(b, {encoded, request.exact});
    if (encoded > 0) build_compressed(b, {0, encoded});
  }
}

}  // namespace bagua::collective
