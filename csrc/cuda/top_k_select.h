// topk: which elements of a block are kept, and where in its part of the message they go. The block lies in shared
// memory.
//
// Most elements are passed over at once. Of groups of elements (those of a thread, or four neighbours) the largest are
// counted by the first 11 bits of their magnitude: so many groups as elements are kept have one in some bin or above,
// hence so have the elements, and what is below that bin is not kept. What remains are candidates, some two times as
// many as are kept where numbers are random. The threshold, the smallest magnitude that is kept, is found among them
// digit by digit (11, 10 and 10 bits) from counts of those that agree in all digits before.
//
// For this a thread owns elements 32 * thread to + 31, one bit each of a word; sums over the block say where its kept
// ones go: ascending, at equal magnitudes the first ones.
#pragma once

#include "codec/formats.h"
#include "cuda/device.h"

namespace bagua::cuda {

// Dynamic, since it is more than a kernel has without asking for it.
extern __shared__ uint4 dynamic_shared[];

namespace top_k {

constexpr uint32_t kBlock = codec::kTopKBlock;
constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kMostBins = 2048;
static_assert(kBlock == 32 * kThreads, "a bit of a word for each element of a thread");

struct Shared {
  float y[kBlock];           // element p at place_of(p)
  uint32_t bins[kMostBins];  // all 0 but while digits are counted
  uint32_t kept[kThreads];   // bit e of word t: element 32 * t + e
  uint32_t warp_sums[kWarps];
  uint32_t found[2];  // a digit, and how many are still wanted of the elements that have it
};

struct Block {
  uint64_t begin;  // first element
  uint32_t count;
  uint32_t kept;
  uint64_t kept_before;
};

// Of what the largest element is counted first.
enum class Groups { kNone, kOfThreads, kOfQuads };

// Elements above the threshold are counted in the low half of a word, those equal to it in the high half: both are at
// most 16384.
constexpr uint32_t kAbove = 1;
constexpr uint32_t kEqual = 1u << 16;

BAGUA_DEVICE Shared& shared() {
  return *reinterpret_cast<Shared*>(dynamic_shared);
}

// Neighbouring quads stay what they are; those of eight threads that own 32 elements each fall on different banks.
BAGUA_DEVICE uint32_t place_of(uint32_t position) {
  return position ^ (position >> 5 & 7) << 2;
}

// More groups than are kept, or nothing would be ruled out; but few, since each is counted.
BAGUA_DEVICE Groups groups_for(uint32_t kept) {
  if (kept <= kThreads / 2) return Groups::kOfThreads;
  return kept <= kBlock / 8 ? Groups::kOfQuads : Groups::kNone;
}

BAGUA_DEVICE void read_shared(uint32_t first, float (&to)[4]) {
  const uint4 words = *reinterpret_cast<const uint4*>(shared().y + place_of(first));
  to[0] = float_of(words.x);
  to[1] = float_of(words.y);
  to[2] = float_of(words.z);
  to[3] = float_of(words.w);
}

BAGUA_DEVICE void write_shared(const float (&v)[4], uint32_t first) {
  *reinterpret_cast<uint4*>(shared().y + place_of(first)) =
      make_uint4(bits_of(v[0]), bits_of(v[1]), bits_of(v[2]), bits_of(v[3]));
}

// Inclusive sum over the lanes up to this one.
BAGUA_DEVICE uint32_t sum_up_to_lane(uint32_t v) {
#pragma unroll
  for (unsigned delta = 1; delta < 32; delta *= 2) {
    const uint32_t below = __shfl_up_sync(kAllLanes, v, delta);
    if (lane_of_thread() >= delta) v += below;
  }
  return v;
}

// Sum over the threads before this one.
BAGUA_DEVICE uint32_t sum_before_thread(uint32_t own) {
  Shared& s = shared();
  const uint32_t up_to_lane = sum_up_to_lane(own);
  if (lane_of_thread() == 31) s.warp_sums[threadIdx.x / 32] = up_to_lane;
  __syncthreads();
  const uint32_t warp = lane_of_thread();
  const uint32_t of_warp = warp < threadIdx.x / 32 ? s.warp_sums[warp] : 0u;
  return up_to_lane - own + __reduce_add_sync(kAllLanes, of_warp);
}

struct Digit {
  uint32_t digit;
  uint32_t wanted;  // how many of the elements that have it
};

// The largest digit that, with all larger ones, at least `wanted` elements have. Clears the bins.
template <int kBits>
BAGUA_DEVICE Digit find_digit(uint32_t wanted) {
  constexpr int kBins = (1 << kBits) / kThreads;  // of a thread, from the largest digit down
  Shared& s = shared();
  const uint32_t top = (1u << kBits) - 1 - threadIdx.x * kBins;
  uint32_t counts[kBins];
  uint32_t own = 0;
#pragma unroll
  for (int b = 0; b < kBins; ++b) {
    own += counts[b] = s.bins[top - b];
    s.bins[top - b] = 0;
  }
  uint32_t before = sum_before_thread(own);
#pragma unroll
  for (int b = 0; b < kBins; ++b) {
    if (before < wanted && wanted <= before + counts[b]) {
      s.found[0] = top - b;
      s.found[1] = wanted - before;
    }
    before += counts[b];
  }
  __syncthreads();
  return {s.found[0], s.found[1]};
}

// Magnitude of element number e of those that the thread owns.
BAGUA_DEVICE uint32_t owned_magnitude(uint32_t e) {
  return magnitude_of(shared().y[place_of(32 * threadIdx.x + e)]);
}

BAGUA_DEVICE uint32_t lowest_bit(uint32_t bits) {
  return static_cast<uint32_t>(__ffs(static_cast<int>(bits))) - 1;
}

// Elements of the thread that exist.
BAGUA_DEVICE uint32_t existing(const Block& block) {
  const uint32_t first = 32 * threadIdx.x;
  if (first >= block.count) return 0;
  return block.count - first >= 32 ? kAllLanes : (1u << (block.count - first)) - 1;
}

// Elements of the thread that may be kept.
BAGUA_DEVICE uint32_t find_candidates(const Block& block, Groups groups) {
  if (groups == Groups::kNone) return existing(block);
  const uint32_t least = find_digit<11>(block.kept).digit << 20;
  uint32_t candidates = 0;
#pragma unroll
  for (uint32_t q = 0; q < 8; ++q) {
    float y[4];
    read_shared(32 * threadIdx.x + 4 * q, y);
#pragma unroll
    for (uint32_t c = 0; c < 4; ++c) candidates |= magnitude_of(y[c]) >= least ? 1u << (4 * q + c) : 0u;
  }
  return candidates & existing(block);
}

// Elements of a thread, a bit each: those above the threshold, and those that agree with it in all digits so far.
struct Sorted {
  uint32_t above;
  uint32_t equal;
};

// Sorts the equal ones by whether their bits from kShift up are above `prefix`, equal to it, or below; counts the next
// digit of those that are still equal.
template <int kShift>
BAGUA_DEVICE void sort_by(uint32_t prefix, Sorted& sorted) {
  uint32_t equal = 0;
  for (uint32_t left = sorted.equal; left != 0; left &= left - 1) {
    const uint32_t e = lowest_bit(left);
    const uint32_t magnitude = owned_magnitude(e);
    if (magnitude >> kShift > prefix) sorted.above |= 1u << e;
    if (magnitude >> kShift != prefix) continue;
    equal |= 1u << e;
    if constexpr (kShift >= 10) atomicAdd(&shared().bins[magnitude >> (kShift - 10) & 1023u], 1u);
  }
  sorted.equal = equal;
  if constexpr (kShift >= 10) __syncthreads();
}

// What the thread keeps of the elements it owns, and where they go in the block's part of the message.
struct Kept {
  uint32_t elements;
  uint32_t at;
};

// Of the equal ones the first `ties` of the block are kept.
BAGUA_DEVICE Kept settle_ties(const Sorted& sorted, uint32_t ties) {
  const auto equal = static_cast<uint32_t>(__popc(sorted.equal));
  const uint32_t before = sum_before_thread(static_cast<uint32_t>(__popc(sorted.above)) * kAbove + equal * kEqual);
  const uint32_t equal_before = min(before / kEqual, ties);
  const uint32_t wanted = min(equal, ties - equal_before);
  uint32_t first_ones = sorted.equal;
  if (wanted < equal) {
    first_ones = 0;
    uint32_t left = sorted.equal;
    for (uint32_t k = 0; k < wanted; ++k) {
      first_ones |= left & (0u - left);
      left &= left - 1;
    }
  }
  return {sorted.above | first_ones, before % kEqual + equal_before};
}

BAGUA_DEVICE Kept select(const Block& block, Groups groups) {
  Sorted sorted{0, find_candidates(block, groups)};
  for (uint32_t left = sorted.equal; left != 0; left &= left - 1) {
    atomicAdd(&shared().bins[owned_magnitude(lowest_bit(left)) >> 20], 1u);
  }
  __syncthreads();
  Digit found = find_digit<11>(block.kept);
  uint32_t prefix = found.digit;
  sort_by<20>(prefix, sorted);
  found = find_digit<10>(found.wanted);
  prefix = prefix << 10 | found.digit;
  sort_by<10>(prefix, sorted);
  found = find_digit<10>(found.wanted);
  sort_by<0>(prefix << 10 | found.digit, sorted);
  return settle_ties(sorted, found.wanted);
}

}  // namespace top_k
}  // namespace bagua::cuda
