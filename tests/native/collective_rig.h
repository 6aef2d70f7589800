// Runs the programs of all hosts in one thread, on a network that buffers nothing and delivers in any order that the
// rules of collective/program.h allow.
#pragma once

#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <random>
#include <vector>

#include "collective/execute.h"
#include "collective/program.h"
#include "harness.h"

namespace bagua::collective {

using Members = std::vector<std::vector<int>>;

struct Case {
  Request request;
  Members members;
  size_t chunk_bytes = 64;
  bool in_place = false;
  std::vector<int> ring = {};
  // Element i of what a member gives; without it, random whole numbers from 1 to 9.
  std::function<float(size_t member, size_t i)> input = nullptr;
  std::function<Program(const Topology&, const Request&, size_t)> make_program = &compile;
};

// How many blocks a member gives and gets.
inline void extent(const Case& c, int index, size_t n, size_t* gives, size_t* gets) {
  const auto is = [kind = c.request.kind](auto... kinds) { return ((kind == kinds) || ...); };
  const bool root = index == c.request.root;
  *gives = is(Kind::kReduceScatter, Kind::kScatter, Kind::kAllToAll) ? n : 1;
  *gets = is(Kind::kAllGather, Kind::kGather, Kind::kAllToAll) ? n : 1;
  if (is(Kind::kBroadcast, Kind::kScatter) && !root) *gives = 0;
  if (is(Kind::kReduce, Kind::kGather) && !root) *gets = 0;
}

struct Host {
  Program program;
  Memory memory;
  std::vector<char> scratch;  // with room to align it
  std::vector<uint32_t> waits;
  std::vector<std::deque<uint32_t>> sends, receives;  // by peer
  std::vector<uint32_t> ready;
  size_t remaining = 0;

  void done(uint32_t index) {
    const Step& step = program.steps[index];
    --remaining;
    for (uint32_t i = 0; i < step.successors; ++i) {
      const uint32_t next = program.successors[step.first_successor + i];
      if (--waits[next] == 0) made_ready(next);
    }
  }
  void made_ready(uint32_t index) {
    if (computes(program.steps[index].type)) ready.push_back(index);
  }
};

class Simulation {
 public:
  // `residuals`: of every host, request.count elements, if the request has error feedback.
  Simulation(const Case& c, unsigned seed, std::vector<std::vector<float>>* residuals = nullptr)
      : case_(c), random_(seed) {
    Topology topology{c.members, 0, c.ring};
    n_ = static_cast<size_t>(topology.size());
    inputs_.resize(n_);
    sources_.resize(n_);
    targets_.resize(n_);
    for (size_t i = 0; i < n_; ++i) fill(i);
    for (int h = 0; h < topology.hosts(); ++h) {
      topology.host = h;
      hosts_.push_back(make_host(topology));
      if (residuals != nullptr) {
        hosts_.back().memory.residual = reinterpret_cast<char*>((*residuals)[static_cast<size_t>(h)].data());
      }
    }
  }

  // Runs random enabled events until none is left; true if all programs ended.
  bool run() {
    while (compute() || transfer()) {
    }
    for (const Host& host : hosts_) {
      if (host.remaining > 0) return false;
    }
    return true;
  }

  void check() const {
    for (size_t i = 0; i < n_; ++i) {
      size_t gives, gets;
      extent(case_, static_cast<int>(i), n_, &gives, &gets);
      if (case_.request.kind == Kind::kBarrier) continue;
      for (size_t k = 0; k < gets * case_.request.count; ++k) CHECK_EQ(target(i)[k], expected(i, k));
      if (case_.in_place) continue;
      CHECK(sources_[i] == inputs_[i]);
      CHECK_EQ(targets_[i].back(), -7.0f);  // nothing behind the result was written
    }
  }

  // Allows messages longer than a chunk.
  void allow(size_t bytes) { longest_ = bytes; }
  const std::map<size_t, uint64_t>& sent() const { return sent_; }  // bytes, by host
  size_t messages() const { return messages_; }
  const float* target(size_t i) const { return case_.in_place ? sources_[i].data() + into_[i] : targets_[i].data(); }

 private:
  void fill(size_t i) {
    size_t gives, gets;
    const uint64_t count = case_.request.count;
    extent(case_, static_cast<int>(i), n_, &gives, &gets);
    std::uniform_int_distribution<int> digit(1, 9);
    inputs_[i].assign(gives * count, 0);
    for (size_t k = 0; k < inputs_[i].size(); ++k) {
      inputs_[i][k] = case_.input ? case_.input(i, k) : static_cast<float>(digit(random_));
    }
    at_.push_back(0);
    into_.push_back(0);
    if (!case_.in_place) {
      sources_[i] = inputs_[i];
      targets_[i].assign(gets * count + 1, -7.0f);
      return;
    }
    if (gets > gives) at_[i] = i * count;
    if (gives > gets && gets > 0) into_[i] = i * count;
    sources_[i].assign(std::max(gives, gets) * count + 1, -7.0f);
    std::copy(inputs_[i].begin(), inputs_[i].end(), sources_[i].begin() + static_cast<std::ptrdiff_t>(at_[i]));
  }

  Host make_host(const Topology& topology) {
    Host host;
    host.program = case_.make_program(topology, case_.request, case_.chunk_bytes);
    host.scratch.resize(host.program.scratch_bytes + 64);
    for (const int index : topology.local()) {
      const auto i = static_cast<size_t>(index);
      host.memory.src.push_back(reinterpret_cast<const char*>(sources_[i].data() + at_[i]));
      float* to = case_.in_place ? sources_[i].data() + into_[i] : targets_[i].data();
      host.memory.dst.push_back(reinterpret_cast<char*>(to));
    }
    host.memory.scratch = host.scratch.data() + (64 - reinterpret_cast<uintptr_t>(host.scratch.data()) % 64);
    host.sends.resize(topology.members.size());
    host.receives.resize(topology.members.size());
    host.remaining = host.program.steps.size();
    for (uint32_t i = 0; i < host.program.steps.size(); ++i) {
      const Step& step = host.program.steps[i];
      host.waits.push_back(step.waits_for);
      if (step.type == Step::Type::kSend) host.sends[static_cast<size_t>(step.peer)].push_back(i);
      if (step.type == Step::Type::kRecv) host.receives[static_cast<size_t>(step.peer)].push_back(i);
      if (step.waits_for == 0) host.made_ready(i);
    }
    return host;
  }

  bool compute() {
    std::vector<Host*> busy;
    for (Host& host : hosts_) {
      if (!host.ready.empty()) busy.push_back(&host);
    }
    // Now and then the network goes first.
    if (busy.empty() || (random_() % 4 == 0 && transfer())) return !busy.empty();
    Host* host = busy[random_() % busy.size()];
    const size_t pick = random_() % host->ready.size();
    const uint32_t index = host->ready[pick];
    host->ready.erase(host->ready.begin() + static_cast<std::ptrdiff_t>(pick));
    run_step(host->program, host->program.steps[index], case_.request, static_cast<int64_t>(n_), host->memory, false);
    host->done(index);
    return true;
  }

  // Moves one message whose send and whose receive are both at the head of their queues and may start.
  bool transfer() {
    const size_t hosts = hosts_.size(), first = random_() % (hosts * hosts);
    for (size_t k = 0; k < hosts * hosts; ++k) {
      const size_t from = (first + k) % (hosts * hosts) / hosts, to = (first + k) % hosts;
      Host &a = hosts_[from], &b = hosts_[to];
      if (a.sends[to].empty() || b.receives[from].empty()) continue;
      const uint32_t send = a.sends[to].front(), receive = b.receives[from].front();
      if (a.waits[send] > 0 || b.waits[receive] > 0) continue;
      const Step &out = a.program.steps[send], &in = b.program.steps[receive];
      CHECK_EQ(out.tag, in.tag);
      CHECK_EQ(out.bytes, in.bytes);
      CHECK(out.bytes <= std::max(case_.chunk_bytes, longest_));
      ++messages_;
      sent_[from] += out.bytes;
      memcpy(target_of(b.memory, b.program.refs[in.first_ref]), source_of(a.memory, a.program.refs[out.first_ref]),
             out.bytes);
      a.sends[to].pop_front();
      b.receives[from].pop_front();
      a.done(send);
      b.done(receive);
      return true;
    }
    return false;
  }

  float expected(size_t i, size_t k) const {
    const uint64_t count = case_.request.count;
    const auto root = static_cast<size_t>(std::max(case_.request.root, 0));
    const auto sum = [this](size_t at) {
      float total = 0;
      for (const auto& input : inputs_) total += input[at];
      return case_.request.op == ReduceOp::kAvg ? total / static_cast<float>(n_) : total;
    };
    switch (case_.request.kind) {
      case Kind::kAllReduce:
      case Kind::kReduce:
        return sum(k);
      case Kind::kReduceScatter:
        return sum(i * count + k);
      case Kind::kBroadcast:
        return inputs_[root][k];
      case Kind::kAllGather:
      case Kind::kGather:
        return inputs_[k / count][k % count];
      case Kind::kScatter:
        return inputs_[root][i * count + k];
      default:
        return inputs_[k / count][i * count + k % count];
    }
  }

  const Case case_;
  std::mt19937 random_;
  size_t n_ = 0;
  std::vector<std::vector<float>> inputs_, sources_, targets_;
  std::vector<size_t> at_, into_;  // in place: where source and target begin, in elements
  std::vector<Host> hosts_;
  size_t longest_ = 8, messages_ = 0;
  std::map<size_t, uint64_t> sent_;
};

}  // namespace bagua::collective
