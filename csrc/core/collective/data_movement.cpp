// Operations that move data without computing. Broadcast sends along a chain of hosts, all-gather round a ring; both
// send chunks, so that all links work at once. Gather, scatter and all-to-all send directly from host to host. Inside a
// host, data are copied once.
#include "collective/builder.h"

namespace bagua::collective {

namespace {

const std::vector<int>& members_at(const Builder& b, int host) {
  return b.topology().members[static_cast<size_t>(host)];
}

uint64_t block(const Builder& b, int index) {
  return static_cast<uint64_t>(index) * b.request().count;
}

void copy_all(Builder* b, int from, uint64_t from_at, const std::vector<int>& to, uint64_t to_at) {
  for (const Range& chunk : b->chunks({0, b->request().count})) {
    std::vector<Ref> targets;
    for (const int member : to) targets.push_back(b->dst(member, to_at + chunk.begin));
    b->copy(b->src(from, from_at + chunk.begin), targets, chunk.count);
  }
}

void send_all(Builder* b, int peer, int from, uint64_t at) {
  for (const Range& chunk : b->chunks({at, b->request().count})) b->send(peer, b->src(from, chunk.begin), chunk.count);
}

void recv_all(Builder* b, int peer, int to, uint64_t at) {
  for (const Range& chunk : b->chunks({at, b->request().count})) b->recv(peer, b->dst(to, chunk.begin), chunk.count);
}

}  // namespace

void build_broadcast(Builder* b) {
  const int hosts = b->hosts(), root_host = b->topology().host_of(b->request().root);
  const int distance = (b->place() - b->topology().ring_place(root_host) + hosts) % hosts;
  const int next = b->next(), prev = b->previous();
  const bool passes_on = distance < hosts - 1;
  const int root = b->topology().position(b->request().root);
  for (const Range& chunk : b->chunks({0, b->request().count})) {
    if (distance == 0) {
      b->copy(b->src(root, chunk.begin), b->all_dst(chunk.begin), chunk.count);
      if (passes_on) b->send(next, b->src(root, chunk.begin), chunk.count);
      continue;
    }
    const StepId arrived = b->recv(prev, b->dst(0, chunk.begin), chunk.count);
    if (passes_on) b->send(next, b->dst(0, chunk.begin), chunk.count, {arrived});
    if (b->locals() > 1) b->copy(b->dst(0, chunk.begin), b->all_dst(chunk.begin, 0), chunk.count, {arrived});
  }
}

void build_all_gather(Builder* b) {
  const int hosts = b->hosts(), place = b->place(), next = b->next(), prev = b->previous();
  const std::vector<int>& mine = b->topology().local();
  std::vector<int> everybody;
  for (int m = 0; m < b->locals(); ++m) everybody.push_back(m);
  for (int m = 0; m < b->locals(); ++m) {
    if (hosts > 1) send_all(b, next, m, 0);
    copy_all(b, m, 0, everybody, block(*b, mine[static_cast<size_t>(m)]));
  }
  for (int s = 0; s < hosts - 1; ++s) {  // forwards to place + 1 the data of place - s - 1
    for (const int index : members_at(*b, b->topology().ring_host(place - s - 1))) {
      for (const Range& chunk : b->chunks({block(*b, index), b->request().count})) {
        const StepId arrived = b->recv(prev, b->dst(0, chunk.begin), chunk.count);
        if (s < hosts - 2) b->send(next, b->dst(0, chunk.begin), chunk.count, {arrived});
        if (b->locals() > 1) b->copy(b->dst(0, chunk.begin), b->all_dst(chunk.begin, 0), chunk.count, {arrived});
      }
    }
  }
}

void build_gather(Builder* b) {
  const std::vector<int>& mine = b->topology().local();
  const int root_host = b->topology().host_of(b->request().root);
  if (b->host() != root_host) {
    for (int m = 0; m < b->locals(); ++m) send_all(b, root_host, m, 0);
    return;
  }
  const int root = b->topology().position(b->request().root);
  for (int m = 0; m < b->locals(); ++m) copy_all(b, m, 0, {root}, block(*b, mine[static_cast<size_t>(m)]));
  for (int h = 0; h < b->hosts(); ++h) {
    if (h == root_host) continue;
    for (const int index : members_at(*b, h)) recv_all(b, h, root, block(*b, index));
  }
}

void build_scatter(Builder* b) {
  const std::vector<int>& mine = b->topology().local();
  const int root_host = b->topology().host_of(b->request().root);
  if (b->host() != root_host) {
    for (int m = 0; m < b->locals(); ++m) recv_all(b, root_host, m, 0);
    return;
  }
  const int root = b->topology().position(b->request().root);
  for (int h = 0; h < b->hosts(); ++h) {
    if (h == root_host) continue;
    for (const int index : members_at(*b, h)) send_all(b, h, root, block(*b, index));
  }
  for (int m = 0; m < b->locals(); ++m) copy_all(b, root, block(*b, mine[static_cast<size_t>(m)]), {m}, 0);
}

void build_all_to_all(Builder* b) {
  const std::vector<int>& mine = b->topology().local();
  for (int o = 1; o < b->hosts(); ++o) {
    const int to = (b->host() + o) % b->hosts(), from = (b->host() + b->hosts() - o) % b->hosts();
    for (int m = 0; m < b->locals(); ++m) {  // both ends use the same order: by sender, then by receiver
      for (const int index : members_at(*b, to)) send_all(b, to, m, block(*b, index));
    }
    for (const int index : members_at(*b, from)) {
      for (int m = 0; m < b->locals(); ++m) recv_all(b, from, m, block(*b, index));
    }
  }
  for (int i = 0; i < b->locals(); ++i) {
    for (int j = 0; j < b->locals(); ++j) {
      copy_all(b, i, block(*b, mine[static_cast<size_t>(j)]), {j}, block(*b, mine[static_cast<size_t>(i)]));
    }
  }
}

}  // namespace bagua::collective
