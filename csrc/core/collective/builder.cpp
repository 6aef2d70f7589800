#include "collective/builder.h"

namespace bagua::collective {

namespace {
constexpr size_t kCacheLine = 64;
}

int Topology::size() const {
  size_t n = 0;
  for (const auto& host_members : members) n += host_members.size();
  return static_cast<int>(n);
}

int Topology::host_of(int index) const {
  for (int h = 0; h < hosts(); ++h) {
    const auto& there = members[static_cast<size_t>(h)];
    if (std::binary_search(there.begin(), there.end(), index)) return h;
  }
  return -1;
}

int Topology::position(int index) const {
  return static_cast<int>(std::lower_bound(local().begin(), local().end(), index) - local().begin());
}

int Topology::ring_host(int place) const {
  const int at = (place % hosts() + hosts()) % hosts();
  return ring.empty() ? at : ring[static_cast<size_t>(at)];
}

int Topology::ring_place(int host) const {
  return ring.empty() ? host : static_cast<int>(std::find(ring.begin(), ring.end(), host) - ring.begin());
}

Range part_of(uint64_t count, int parts, int index) {
  const uint64_t n = static_cast<uint64_t>(parts), i = static_cast<uint64_t>((index % parts + parts) % parts);
  const uint64_t size = count / n, rest = count % n;
  return {i * size + std::min(i, rest), size + (i < rest ? 1 : 0)};
}

Builder::Builder(const Topology& topology, const Request& request, size_t chunk_bytes)
    : topology_(topology),
      request_(request),
      element_(dtype_size(request.dtype)),
      chunk_elements_(std::max<uint64_t>(1, std::max(chunk_bytes, kCacheLine) / kCacheLine * kCacheLine / element_)),
      sent_(topology.members.size(), 0),
      received_(topology.members.size(), 0) {}

std::vector<Range> Builder::chunks(Range whole, uint64_t longest) const {
  if (longest == 0) longest = chunk_elements_;
  std::vector<Range> parts;
  for (uint64_t done = 0; done < whole.count; done += longest) {
    parts.push_back({whole.begin + done, std::min(longest, whole.count - done)});
  }
  return parts;
}

std::vector<int> Builder::others() const {
  std::vector<int> others;
  for (int o = 1; o < hosts(); ++o) others.push_back((host() + o) % hosts());
  return others;
}

Ref Builder::src(int member, uint64_t element) const {
  return {Space::kSrc, static_cast<uint16_t>(member), element * element_};
}

Ref Builder::dst(int member, uint64_t element) const {
  return {Space::kDst, static_cast<uint16_t>(member), element * element_};
}

std::vector<Ref> Builder::all_src(uint64_t element) const {
  std::vector<Ref> refs;
  for (int m = 0; m < locals(); ++m) refs.push_back(src(m, element));
  return refs;
}

std::vector<Ref> Builder::all_dst(uint64_t element, int except) const {
  std::vector<Ref> refs;
  for (int m = 0; m < locals(); ++m) {
    if (m != except) refs.push_back(dst(m, element));
  }
  return refs;
}

Ref Builder::scratch(size_t bytes) {
  const Ref place{Space::kScratch, 0, program_.scratch_bytes};
  program_.scratch_bytes += (bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
  return place;
}

StepId Builder::add(Step::Type type, const Ref* from, size_t n, const Ref* to, size_t m, uint64_t bytes,
                    std::initializer_list<StepId> after) {
  Step step;
  step.type = type;
  step.sources = static_cast<uint32_t>(n);
  step.destinations = static_cast<uint32_t>(m);
  step.first_ref = static_cast<uint32_t>(program_.refs.size());
  step.bytes = bytes;
  program_.refs.insert(program_.refs.end(), from, from + n);
  program_.refs.insert(program_.refs.end(), to, to + m);
  program_.steps.push_back(step);
  const StepId id = static_cast<StepId>(program_.steps.size() - 1);
  for (const StepId earlier : after) depend(id, earlier);
  return id;
}

StepId Builder::reduce(const std::vector<Ref>& from, const std::vector<Ref>& to, uint64_t count, bool final,
                       std::initializer_list<StepId> after) {
  const StepId id = add(Step::Type::kReduce, from.data(), from.size(), to.data(), to.size(), count * element_, after);
  program_.steps[id].final = final;
  return id;
}

StepId Builder::copy(Ref from, const std::vector<Ref>& to, uint64_t count, std::initializer_list<StepId> after) {
  return add(Step::Type::kCopy, &from, 1, to.data(), to.size(), count * element_, after);
}

StepId Builder::transcode(const Pass& pass, std::initializer_list<StepId> after) {
  std::vector<Ref> refs = pass.raw;
  refs.insert(refs.end(), pass.encoded.begin(), pass.encoded.end());
  if (pass.residual != nullptr) refs.push_back(*pass.residual);
  if (pass.message != nullptr) refs.push_back(*pass.message);
  refs.insert(refs.end(), pass.decoded.begin(), pass.decoded.end());
  const StepId id = add(Step::Type::kTranscode, refs.data(), refs.size(), nullptr, 0, pass.count * element_, after);
  Step& step = program_.steps[id];
  step.sources = static_cast<uint32_t>(pass.raw.size());
  step.encoded = static_cast<uint32_t>(pass.encoded.size());
  step.residual = pass.residual != nullptr;
  step.message = pass.message != nullptr;
  step.destinations = static_cast<uint32_t>(pass.decoded.size());
  step.final = pass.final;
  return id;
}

StepId Builder::send(int peer, Ref from, uint64_t count, std::initializer_list<StepId> after) {
  return send_bytes(peer, from, count * element_, after);
}

StepId Builder::recv(int peer, Ref to, uint64_t count, std::initializer_list<StepId> after) {
  return recv_bytes(peer, to, count * element_, after);
}

StepId Builder::send_bytes(int peer, Ref from, size_t bytes, std::initializer_list<StepId> after) {
  const StepId id = add(Step::Type::kSend, &from, 1, nullptr, 0, bytes, after);
  program_.steps[id].peer = peer;
  program_.steps[id].tag = sent_[static_cast<size_t>(peer)]++;
  return id;
}

StepId Builder::recv_bytes(int peer, Ref to, size_t bytes, std::initializer_list<StepId> after) {
  const StepId id = add(Step::Type::kRecv, nullptr, 0, &to, 1, bytes, after);
  program_.steps[id].peer = peer;
  program_.steps[id].tag = received_[static_cast<size_t>(peer)]++;
  return id;
}

void Builder::depend(StepId later, StepId earlier) {
  if (earlier == kNoStep || later == kNoStep) return;
  edges_.emplace_back(earlier, later);
  ++program_.steps[later].waits_for;
}

Program Builder::finish() {
  for (const auto& edge : edges_) ++program_.steps[edge.first].successors;
  uint32_t next = 0;
  for (Step& step : program_.steps) {
    step.first_successor = next;
    next += step.successors;
    step.successors = 0;
  }
  program_.successors.resize(next);
  for (const auto& [earlier, later] : edges_) {
    Step& step = program_.steps[earlier];
    program_.successors[step.first_successor + step.successors++] = later;
  }
  for (int p = 0; p < hosts(); ++p) {
    if (sent_[static_cast<size_t>(p)] + received_[static_cast<size_t>(p)] > 0) program_.peers.push_back(p);
  }
  return std::move(program_);
}

Window::Window(Builder* builder, size_t n, size_t bytes) : busy_(n, kNoStep) {
  for (size_t i = 0; i < n; ++i) places_.push_back(builder->scratch(bytes));
}

Ref Window::take(StepId* free_after) {
  *free_after = busy_[next_];
  return places_[next_];
}

void Window::release_after(StepId step) {
  busy_[next_] = step;
  next_ = (next_ + 1) % busy_.size();
}

Program compile(const Topology& topology, const Request& request, size_t chunk_bytes) {
  Builder builder(topology, request, chunk_bytes);
  if (request.count == 0) {  // there is nothing to move, but hosts still compare their requests
    build_barrier(&builder);
    return builder.finish();
  }
  using Build = void (*)(Builder*);
  constexpr Build kBuild[kKinds] = {build_barrier,    build_all_reduce,     build_broadcast, build_reduce,
                                    build_all_gather, build_reduce_scatter, build_gather,    build_scatter,
                                    build_all_to_all, build_barrier,        build_barrier,   build_barrier};
  // Sends and receives have no program (engine/remote/p2p.h), and no other host has a part in moves of residuals.
  kBuild[static_cast<size_t>(request.kind)](&builder);
  return builder.finish();
}

}  // namespace bagua::collective
