// Codec topk: selects the k elements of a block to keep, and their places in the block's part of the message. The block
// lies in shared memory.
//
// The first step excludes most elements. It takes the largest element of each group (the elements of a thread, or four
// neighbours) and counts these by the first 11 bits of their magnitude. If k groups have an element in some bin or
// above, then at least k elements are there, so elements below that bin are not kept. The remaining elements are
// candidates; for random numbers there are up to 1.5 k. Then it searches the threshold, the smallest magnitude that is
// kept, among the candidates. Each round divides an interval into 2048 bins, and the next round takes one of them. The
// search ends when all candidates of the bin are kept, mostly after one or two rounds. After three rounds a bin is a
// single magnitude.
//
// In the search a thread owns elements 32 * thread to + 31, one bit each of a word. Sums over the block give the places
// of its kept elements: in ascending order, and at equal magnitudes the first elements are kept.
#pragma once

#include "codec/formats.h"
#include "gpu/kernels/device.h"

namespace bagua::cuda {

// Dynamic, because it is more than the default limit of a kernel.
extern __shared__ uint4 dynamic_shared[];

namespace top_k {

constexpr uint32_t kBlock = codec::kTopKBlock;
constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr uint32_t kBins = 4 * kThreads;
constexpr int kDigit = 11;  // bits
static_assert(kBins == 1u << kDigit, "a bin for each digit, four of a thread");
static_assert(kBlock == 32 * kThreads, "a bit of a word for each element of a thread");

// A digit, the number of elements that have it, and how many of these are wanted.
struct Digit {
  uint32_t digit;
  uint32_t count;
  uint32_t wanted;
};

struct Shared {
  float y[kBlock];          // element p at place_of(p)
  uint32_t bins[kBins];     // all 0, except while digits are counted
  uint32_t kept[kThreads];  // bit e of word t: element 32 * t + e
  uint32_t warp_sums[kWarps];
  uint32_t largest[kWarps];  // magnitude of each warp's largest element
  Digit found;
};

struct Block {
  uint64_t begin;  // first element
  uint32_t count;
  uint32_t kept;
  uint64_t kept_before;
};

// The groups of the first step, whose largest elements are counted by their bits from kGroupShift on.
enum class Groups { kNone, kOfThreads, kOfQuads };
constexpr uint32_t kGroupShift = 31 - kDigit;

// The low half of a word counts elements above the threshold, the high half elements equal to it. Both are at most
// 16384.
constexpr uint32_t kAbove = 1;
constexpr uint32_t kEqual = 1u << 16;

BAGUA_DEVICE Shared& shared() {
  return *reinterpret_cast<Shared*>(dynamic_shared);
}

// Place of an element in shared memory. Quads stay contiguous, and quads of eight threads that own 32 elements each lie
// in different banks.
BAGUA_DEVICE uint32_t place_of(uint32_t position) {
  return position ^ (position >> 5 & 7) << 2;
}

// Chooses groups: there must be more groups than kept elements, or none would be excluded, but not many more, because
// each is counted.
BAGUA_DEVICE Groups groups_for(uint32_t kept) {
  if (kept <= kThreads / 2) return Groups::kOfThreads;
  return kept <= kBlock / 8 ? Groups::kOfQuads : Groups::kNone;
}

// Place of the thread's element `e`.
BAGUA_DEVICE uint32_t place_of_owned(uint32_t e) {
  return place_of(32 * threadIdx.x) ^ e;
}

BAGUA_DEVICE void read_shared(uint32_t place, float (&to)[4]) {
  const uint4 words = *reinterpret_cast<const uint4*>(shared().y + place);
  to[0] = float_of(words.x);
  to[1] = float_of(words.y);
  to[2] = float_of(words.z);
  to[3] = float_of(words.w);
}

BAGUA_DEVICE void write_shared(const float (&v)[4], uint32_t place) {
  *reinterpret_cast<uint4*>(shared().y + place) =
      make_uint4(bits_of(v[0]), bits_of(v[1]), bits_of(v[2]), bits_of(v[3]));
}

// Sum over all lanes up to this one, inclusive.
BAGUA_DEVICE uint32_t sum_up_to_lane(uint32_t v) {
#pragma unroll
  for (unsigned delta = 1; delta < 32; delta *= 2) {
    const uint32_t below = __shfl_up_sync(kAllLanes, v, delta);
    if (lane_of_thread() >= delta) v += below;
  }
  return v;
}

// Sum over all threads before this one.
BAGUA_DEVICE uint32_t sum_before_thread(uint32_t own) {
  Shared& s = shared();
  const uint32_t up_to_lane = sum_up_to_lane(own);
  if (lane_of_thread() == 31) s.warp_sums[threadIdx.x / 32] = up_to_lane;
  __syncthreads();
  const uint32_t warp = lane_of_thread();
  const uint32_t of_warp = warp < threadIdx.x / 32 ? s.warp_sums[warp] : 0u;
  return up_to_lane - own + __reduce_add_sync(kAllLanes, of_warp);
}

// Finds the largest digit such that at least `wanted` elements have it or a larger one. Clears the bins.
BAGUA_DEVICE Digit find_digit(uint32_t wanted) {
  Shared& s = shared();
  const uint32_t four = kThreads - 1 - threadIdx.x;  // thread 0 takes the largest digits
  uint4* const bins = reinterpret_cast<uint4*>(s.bins) + four;
  const uint4 counts = *bins;
  *bins = make_uint4(0, 0, 0, 0);
  const uint32_t own = counts.x + counts.y + counts.z + counts.w;
  const uint32_t before = sum_before_thread(own);
  if (before < wanted && wanted <= before + own) {
    Digit found{4 * four + 3, counts.w, wanted - before};
    const uint32_t others[] = {counts.z, counts.y, counts.x};
#pragma unroll
    for (const uint32_t count : others) {
      if (found.wanted > found.count) found = {found.digit - 1, count, found.wanted - found.count};
    }
    s.found = found;
  }
  __syncthreads();
  return s.found;
}

// Magnitude of the thread's element `e`.
BAGUA_DEVICE uint32_t owned_magnitude(uint32_t e) {
  return magnitude_of(shared().y[place_of_owned(e)]);
}

BAGUA_DEVICE uint32_t highest_bit(uint32_t bits) {
  return 31 - static_cast<uint32_t>(__clz(static_cast<int>(bits)));
}

// Bit mask of the thread's elements that exist.
BAGUA_DEVICE uint32_t existing(const Block& block) {
  const uint32_t first = 32 * threadIdx.x;
  if (first >= block.count) return 0;
  return block.count - first >= 32 ? kAllLanes : (1u << (block.count - first)) - 1;
}

// Bit mask of the thread's elements whose magnitude is at least `least`. It tests the sign of the difference, which is
// never set for NaN.
BAGUA_DEVICE uint32_t find_candidates(const Block& block, uint32_t least) {
  uint32_t below = 0;
#pragma unroll
  for (int q = 7; q >= 0; --q) {
    float y[4];
    read_shared(place_of_owned(4 * static_cast<uint32_t>(q)), y);
#pragma unroll
    for (int c = 3; c >= 0; --c) {
      below = __funnelshift_l(bits_of(__fsub_rn(fabsf(y[c]), float_of(least))), below, 1);
    }
  }
  return ~below & existing(block);
}

// Bit masks of a thread's elements: those above the threshold, and those not decided yet.
struct Sorted {
  uint32_t above;
  uint32_t equal;
};

// An interval of magnitudes from `first` on, in bins of 2^shift.
struct Interval {
  uint32_t first;
  uint32_t shift;

  BAGUA_DEVICE uint32_t digit(uint32_t magnitude) const { return (magnitude - first) >> shift; }
};

// The smallest interval from `first` that contains `last`.
BAGUA_DEVICE Interval interval_up_to(uint32_t first, uint32_t last) {
  const int bits = 32 - __clz(static_cast<int>(last - first));
  return {first, static_cast<uint32_t>(max(bits - kDigit, 0))};
}

// Finds the bin of the threshold and sorts the undecided elements by it. Returns the bin and how many of its elements
// are wanted.
BAGUA_DEVICE Digit sort_by(const Interval& interval, uint32_t wanted, Sorted& sorted) {
  for (uint32_t left = sorted.equal; left != 0;) {
    const uint32_t e = highest_bit(left);
    left ^= 1u << e;
    atomicAdd(&shared().bins[interval.digit(owned_magnitude(e))], 1u);
  }
  __syncthreads();
  const Digit found = find_digit(wanted);
  uint32_t equal = 0;
  for (uint32_t left = sorted.equal; left != 0;) {
    const uint32_t e = highest_bit(left);
    left ^= 1u << e;
    const uint32_t digit = interval.digit(owned_magnitude(e));
    if (digit > found.digit) sorted.above |= 1u << e;
    if (digit == found.digit) equal |= 1u << e;
  }
  sorted.equal = equal;
  return found;
}

// The elements that a thread keeps, and their places in the block's part of the message.
struct Kept {
  uint32_t elements;
  uint32_t at;
};

// Of the elements equal to the threshold, the first `ties` of the block are kept.
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

// The block's largest magnitude; if it has a NaN, the largest possible one.
BAGUA_DEVICE uint32_t largest_of_block() {
  const uint32_t warp = lane_of_thread();
  return __reduce_max_sync(kAllLanes, warp < kWarps ? shared().largest[warp] : 0u);
}

BAGUA_DEVICE Kept select(const Block& block, Groups groups) {
  const uint32_t largest = largest_of_block();
  const uint32_t least = groups == Groups::kNone ? 0 : find_digit(block.kept).digit << kGroupShift;
  Sorted sorted{0, find_candidates(block, least)};
  Interval interval = interval_up_to(least, largest);
  Digit found = sort_by(interval, block.kept, sorted);
  while (found.count != found.wanted && interval.shift != 0) {
    interval.first += found.digit << interval.shift;
    interval.shift = interval.shift > kDigit ? interval.shift - kDigit : 0;
    found = sort_by(interval, found.wanted, sorted);
  }
  return settle_ties(sorted, found.wanted);
}

}  // namespace top_k
}  // namespace bagua::cuda
