// Builds programs: numbers messages, allocates scratch memory, and records dependencies between steps.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <utility>
#include <vector>

#include "collective/program.h"

namespace bagua::collective {

using StepId = uint32_t;
constexpr StepId kNoStep = UINT32_MAX;

// Elements [begin, begin + count) of a vector.
struct Range {
  uint64_t begin = 0, count = 0;
};

// One pass of a codec's kernel, see Transcode in codec/codec.h.
struct Pass {
  std::vector<Ref> raw, encoded;
  const Ref* residual = nullptr;
  const Ref* message = nullptr;
  std::vector<Ref> decoded;
  uint64_t count = 0;
  bool final = false;
};

class Builder {
 public:
  Builder(const Topology& topology, const Request& request, size_t chunk_bytes);

  const Topology& topology() const { return topology_; }
  const Request& request() const { return request_; }
  int host() const { return topology_.host; }
  int hosts() const { return topology_.hosts(); }
  int locals() const { return static_cast<int>(topology_.local().size()); }
  size_t element() const { return element_; }
  size_t chunk_bytes() const { return chunk_elements_ * element_; }
  // This host's place in the ring; the hosts after and before it.
  int place() const { return topology_.ring_place(topology_.host); }
  int next() const { return topology_.ring_host(place() + 1); }
  int previous() const { return topology_.ring_host(place() - 1); }

  // Cuts `whole` into chunks of at most `longest` elements (0: chunk_bytes()); empty for an empty range.
  std::vector<Range> chunks(Range whole, uint64_t longest = 0) const;
  // The other hosts, beginning after this one, so that hosts do not all send to the same one first.
  std::vector<int> others() const;

  // References to memory, with offsets in elements.
  Ref src(int member, uint64_t element) const;
  Ref dst(int member, uint64_t element) const;
  std::vector<Ref> all_src(uint64_t element) const;
  std::vector<Ref> all_dst(uint64_t element, int except = -1) const;
  // Allocates `bytes` of scratch memory, aligned to a cache line.
  Ref scratch(size_t bytes);

  // Add a step. `count` is in elements. The steps in `after` must complete first (kNoStep is ignored).
  StepId reduce(const std::vector<Ref>& from, const std::vector<Ref>& to, uint64_t count, bool final,
                std::initializer_list<StepId> after = {});
  StepId copy(Ref from, const std::vector<Ref>& to, uint64_t count, std::initializer_list<StepId> after = {});
  StepId transcode(const Pass& pass, std::initializer_list<StepId> after = {});
  StepId send(int peer, Ref from, uint64_t count, std::initializer_list<StepId> after = {});
  StepId recv(int peer, Ref to, uint64_t count, std::initializer_list<StepId> after = {});
  // The same with a length in bytes.
  StepId send_bytes(int peer, Ref from, size_t bytes, std::initializer_list<StepId> after = {});
  StepId recv_bytes(int peer, Ref to, size_t bytes, std::initializer_list<StepId> after = {});
  void depend(StepId later, StepId earlier);

  Program finish();

 private:
  StepId add(Step::Type type, const Ref* from, size_t n, const Ref* to, size_t m, uint64_t bytes,
             std::initializer_list<StepId> after);

  const Topology& topology_;
  const Request& request_;
  const size_t element_;
  const uint64_t chunk_elements_;
  Program program_;
  std::vector<std::pair<StepId, StepId>> edges_;  // earlier, later
  std::vector<uint64_t> sent_, received_;         // messages so far, by peer
};

// A ring of `n` scratch buffers. A buffer is free again when the step that uses it has completed.
class Window {
 public:
  Window(Builder* builder, size_t n, size_t bytes);
  // Returns the next buffer; it may be written after step *free_after.
  Ref take(StepId* free_after);
  // The buffer returned last is in use until `step` completes.
  void release_after(StepId step);

 private:
  std::vector<Ref> places_;
  std::vector<StepId> busy_;
  size_t next_ = 0;
};

// Cuts `count` elements into `parts` parts of nearly equal size; returns part `index` modulo `parts`.
Range part_of(uint64_t count, int parts, int index);

// One function for each kind of operation, or for several similar kinds; hosts >= 1. In all_reduce.cpp,
// reduce_and_barrier.cpp and data_movement.cpp.
void build_barrier(Builder* builder);
void build_all_reduce(Builder* builder);
// How an all-reduce goes between hosts; the cheapest for so many hosts and bytes (short_all_reduce.cpp).
enum class Pattern : uint8_t { kDirect, kHalvingDoubling, kRing };
Pattern cheapest_pattern(int hosts, uint64_t bytes);
// All-reduce of a range of elements between hosts (hosts >= 2). build_plain: unencoded, by the cheapest pattern.
// build_direct: one trip. build_halving_doubling: 2 log2(hosts) trips (short_all_reduce.cpp). build_compressed: encoded
// (compressed.cpp).
void build_plain(Builder* builder, Range range);
void build_direct(Builder* builder, Range range);
void build_halving_doubling(Builder* builder, Range range);
void build_compressed(Builder* builder, Range range);
void build_reduce(Builder* builder);
void build_reduce_scatter(Builder* builder);
void build_broadcast(Builder* builder);
void build_all_gather(Builder* builder);
void build_gather(Builder* builder);
void build_scatter(Builder* builder);
void build_all_to_all(Builder* builder);

}  // namespace bagua::collective
