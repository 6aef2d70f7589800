// Reduce and reduce-scatter: each host adds up the contributions of its ranks and sends the partial result to the host
// that needs it. That host adds the partials of all hosts in one pass. Barrier: each host sends a message to each
// other.
#include "collective/builder.h"

namespace bagua::collective {

namespace {

constexpr size_t kChunkWindow = 4;  // chunks in flight for each pair of hosts

// Sends this host's partial sum of src[at, at + count) in chunks.
void send_partial(Builder* b, int peer, uint64_t at, uint64_t count, Window* window) {
  for (const Range& chunk : b->chunks({at, count})) {
    if (b->locals() == 1) {
      b->send(peer, b->src(0, chunk.begin), chunk.count);
      continue;
    }
    StepId free_after;
    const Ref place = window->take(&free_after);
    const StepId sum = b->reduce(b->all_src(chunk.begin), {place}, chunk.count, false, {free_after});
    window->release_after(b->send(peer, place, chunk.count, {sum}));
  }
}

// Adds the partials of all hosts for src[at, at + count) into the dst of local member `member`.
void receive_sum(Builder* b, int member, uint64_t at, uint64_t count, std::vector<Window>* windows) {
  const std::vector<int> peers = b->others();
  for (const Range& chunk : b->chunks({at, count})) {
    std::vector<Ref> sources = b->all_src(chunk.begin);
    std::vector<StepId> arrived;
    for (size_t p = 0; p < peers.size(); ++p) {
      StepId free_after;
      sources.push_back((*windows)[p].take(&free_after));
      arrived.push_back(b->recv(peers[p], sources.back(), chunk.count, {free_after}));
    }
    const StepId sum = b->reduce(sources, {b->dst(member, chunk.begin - at)}, chunk.count, true);
    for (size_t p = 0; p < peers.size(); ++p) {
      b->depend(sum, arrived[p]);
      (*windows)[p].release_after(sum);
    }
  }
}

std::vector<Window> windows_for(Builder* b, size_t peers, uint64_t count) {
  std::vector<Window> windows;
  for (size_t p = 0; p < peers; ++p) {
    windows.emplace_back(b, kChunkWindow, std::min<uint64_t>(b->chunk_bytes(), count * b->element()));
  }
  return windows;
}

}  // namespace

void build_reduce(Builder* b) {
  const uint64_t count = b->request().count;
  const int root_host = b->topology().host_of(b->request().root);
  if (b->host() == root_host) {
    std::vector<Window> windows = windows_for(b, b->others().size(), count);
    receive_sum(b, b->topology().position(b->request().root), 0, count, &windows);
  } else {
    std::vector<Window> windows = windows_for(b, 1, b->locals() == 1 ? 0 : count);
    send_partial(b, root_host, 0, count, &windows[0]);
  }
}

void build_reduce_scatter(Builder* b) {
  const uint64_t count = b->request().count;
  for (const int peer : b->others()) {
    std::vector<Window> windows = windows_for(b, 1, b->locals() == 1 ? 0 : count);
    for (const int index : b->topology().members[static_cast<size_t>(peer)]) {
      send_partial(b, peer, static_cast<uint64_t>(index) * count, count, &windows[0]);
    }
  }
  std::vector<Window> windows = windows_for(b, b->others().size(), count);
  for (int m = 0; m < b->locals(); ++m) {
    const uint64_t index = static_cast<uint64_t>(b->topology().local()[static_cast<size_t>(m)]);
    receive_sum(b, m, index * count, count, &windows);
  }
}

void build_barrier(Builder* b) {
  if (b->hosts() == 1) return;
  const Ref out = b->scratch(b->element());
  for (const int peer : b->others()) {
    b->send(peer, out, 1);
    b->recv(peer, b->scratch(b->element()), 1);
  }
}

}  // namespace bagua::collective
