// The shared memory between a node daemon and its ranks: fixed layout, no pointers, every field readable by both sides.
//
// Four kinds of mapping, each a sealed memfd that the daemon makes and passes over the Unix socket (see protocol.h):
//   JobPage         one per engine: doorbell, counters. Mapped by the daemon and all local ranks.
//   GenerationPage  one per generation, and for each lobby: members, the first error, and all that is keyed by rank.
//                   Mapped by the daemon and by the ranks that have entered the generation: a rank that is late
//                   scribbles in its own old one.
//   RankChannel     one per member: submission ring and slots. Mapped by the daemon and that rank alone.
//   segment         tensor memory, named by (id, byte offset) in descriptors. Mapped by the daemon and its owner; one
//                   that was made for peers also by other ranks of the host.
//
// A process has a member number for life. Its rank, 0 to n-1, is that of a generation.
//
// Hand-over of an operation. The rank takes a free slot, fills `descriptor`, sets `state` to kSubmitted, writes the
// slot's number into `ring[tail % kSlots]`, publishes `tail` (release) and rings the doorbell. The daemon reads `tail`
// (acquire), copies the descriptor to private memory before it believes anything in it, and at the end writes the times
// and sets `state` to kDone, kFailed or kRegrouped (release); it wakes the futex only if the state was
// kSubmittedWaiting. The rank that waits frees the slot. Slots are freed in any order; `tail` only grows, and at most
// kSlots operations are in flight, so the ring never overflows. All futexes are non-private.
//
// An operation belongs to the generation in which its rank submitted it. What a newer one finds ends as kRegrouped.
//
// Ringing the doorbell. A collective can't run before all local members have submitted it, so only the last of them
// wakes the daemon: each counts its collectives of a communicator in `arrivals` and looks at the others' counts
// (sequentially consistent, so of two that arrive at once at least one sees the other). A rank that scribbles there
// costs others the time until the daemon looks by itself, no more. Sends and receives, and communicators without
// counters, always ring.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "kernel/reduce.h"

namespace bagua {

// Meaning of count, src and dst. n is the size of the communicator, "at root" the rank whose index equals `root`.
//   kBarrier        nothing
//   kAllReduce      src: count elements -> dst: count elements
//   kReduce         the same; dst is written, and need be given, at root only
//   kBroadcast      src: count elements, at root only -> dst: count elements, everywhere
//   kAllGather      src: count -> dst: n * count, in the order of the communicator
//   kReduceScatter  src: n * count -> dst: count (block number "my index")
//   kGather         src: count -> dst: n * count, at root only
//   kScatter        src: n * count, at root only -> dst: count
//   kAllToAll       src: n * count -> dst: n * count; block j of rank i's src becomes block i of rank j's dst
//   kSend           src: count; root is the destination's index
//   kRecv           dst: count; root is the source's index, or kAnySource; then the daemon writes the source's
//                   index to the slot's root
//   kMoveResiduals  src: count int64 words, rows of ResidualMove: this host's residuals of the communicator. Fenced;
//                   every local rank passes the same, and each host does it by itself
// src and dst may be the same memory for all-reduce, reduce and broadcast. For all-gather, gather and scatter the small
// side may lie exactly at its own block of the large side, and so it may for reduce-scatter. No other overlap.
enum class Kind : uint8_t {
  kBarrier = 0,
  kAllReduce = 1,
  kBroadcast = 2,
  kReduce = 3,
  kAllGather = 4,
  kReduceScatter = 5,
  kGather = 6,
  kScatter = 7,
  kAllToAll = 8,
  kSend = 9,
  kRecv = 10,
  kMoveResiduals = 11,
};
constexpr int kKinds = 12;

// Defined here, as are those of kernel/reduce.h, for the GPU leg and the c10d backend, which do not link with the core.
inline const char* kind_name(Kind kind) {  // for the API
  constexpr const char* kNames[kKinds] = {"barrier", "allreduce", "broadcast", "reduce", "allgather", "reduce_scatter",
                                          "gather",  "scatter",   "alltoall",  "send",   "recv",      "move_residuals"};
  return kNames[static_cast<int>(kind)];
}
inline const char* kind_title(Kind kind) {  // for people
  constexpr const char* kTitles[kKinds] = {"barrier",    "all-reduce",     "broadcast", "reduce",
                                           "all-gather", "reduce-scatter", "gather",    "scatter",
                                           "all-to-all", "send",           "recv",      "move of residuals"};
  return kTitles[static_cast<int>(kind)];
}
constexpr bool kind_known(uint8_t kind) {
  return kind < kKinds;
}
constexpr bool kind_reduces(Kind kind) {
  return kind == Kind::kAllReduce || kind == Kind::kReduce || kind == Kind::kReduceScatter;
}
constexpr bool kind_rooted(Kind kind) {
  return kind == Kind::kReduce || kind == Kind::kBroadcast || kind == Kind::kGather || kind == Kind::kScatter ||
         kind == Kind::kSend || kind == Kind::kRecv;
}
constexpr bool op_known(uint8_t op) {
  return op <= 3 || (op >= 7 && op <= 10);
}

// How many blocks of `count` elements the kind reads and writes at this rank, of n.
struct Extent {
  uint64_t src, dst;
};
constexpr Extent blocks_of(Kind kind, bool at_root, uint64_t n) {
  const uint64_t root = at_root ? 1 : 0;
  const Extent extents[kKinds] = {{0, 0},        {1, 1},        {root, 1}, {1, root}, {1, n}, {n, 1},
                                  {1, root * n}, {root * n, 1}, {n, n},    {1, 0},    {0, 1}, {1, 0}};
  return extents[static_cast<int>(kind)];
}

constexpr uint32_t kSlots = 1024;
constexpr uint32_t kMaxMembers = 8192;
constexpr int kMaxDims = 8;
constexpr size_t kLabelBytes = 32;
constexpr int32_t kAnySource = -1;
constexpr size_t kErrorBytes = 3072;
constexpr uint32_t kArrivalComms = 16;  // communicators 0 to 15 have arrival counters
constexpr uint32_t kArrivalRanks = 64;  // on hosts with at most so many ranks
constexpr uint32_t kMeetingRanks = 16;  // communicators inside a host with at most so many ranks may have a room
constexpr uint32_t kRooms = 32;         // of a generation, on this host: 1 to 32. Room 0 is nobody's
constexpr uint32_t kWorldRoom = 1;
// A rank brings at most so many bytes. With two ranks on two cores 1 MiB in memory of buckets takes the ranks 187 us,
// and the daemon 69: it need not copy.
constexpr size_t kMeetingBytes = 256 << 10;
// Where each rank would read more of all vectors, each reduces a slice for all. Measured with 2 and 4 ranks on two
// cores: from there on waiting once more costs less than reading. All ranks cut alike.
constexpr uint64_t kMostRead = 128 << 10;  // bytes
constexpr uint64_t kSliceStep = 64;        // elements: slices begin at lines of the cache
// True if the members of a communicator on so many hosts may have a room.
constexpr bool may_meet(size_t hosts, size_t ranks) {
  return hosts == 1 && ranks > 1 && ranks <= kMeetingRanks;
}

struct Descriptor {
  uint8_t kind;
  uint8_t dtype;
  uint8_t op;
  uint8_t ndim;  // of `dims`; more than kMaxDims dimensions: 0
  uint32_t comm;
  uint64_t count;
  int32_t root;  // -1: none
  uint32_t src_segment;
  uint32_t dst_segment;
  uint8_t codec;  // kAllReduce of float32, SUM or AVG: how it crosses between hosts, see codec/codec.h; 0: as it is
  uint8_t residual_sides;  // ResidualSides
  uint16_t density;        // kTopK
  uint64_t src_offset;
  uint64_t dst_offset;
  uint32_t residual;        // error feedback: number of a residual that the engine keeps for this host; 0: none
  uint32_t exact;           // with a codec: so many last elements cross as they are
  int64_t dims[kMaxDims];   // the user's shape, for error messages only
  uint16_t fenced;          // 1: a collective that begins here when all before it on its communicator are done here
  uint16_t chunk_kib;       // an all-reduce between hosts goes in chunks of so many KiB; 0: as the engine was told
  uint32_t tag;             // kSend, kRecv: those of the same tag belong together, each with the next of its kind
  char label[kLabelBytes];  // for error messages only; not trusted to be terminated
};
static_assert(sizeof(Descriptor) == 160, "part of the shared layout");

// Where an operation reads and writes its residual. A rank that may have to repeat the operation names two sides, and
// swaps them when the step counts; so that a repeated step reads what the first attempt read.
enum ResidualSides : uint8_t { kInPlace = 0, kRead0Write1 = 1, kRead1Write0 = 2 };
constexpr uint8_t kResidualSides = 3;

// One row of kMoveResiduals. Where vectors are cut anew, `length` elements of residual `from` (its side `side`) are
// copied to side 0 of residual `to`, which has `to_count` elements, zeros at first, and is made by the first row that
// names it. What `from` does not hold is zero. `to` 0: residual `from` goes.
struct ResidualMove {
  int64_t to, to_count, to_begin;
  int64_t from, from_begin, side;
  int64_t length;
};
constexpr uint64_t kResidualMoveWords = sizeof(ResidualMove) / sizeof(int64_t);

// kRegrouped: its generation has ended; the rank enters the next one, and submits it again if it still wants it.
// kDeferred: not submitted yet, because the rank is going to try it with the others when it waits.
enum SlotState : uint32_t {
  kFree = 0,
  kSubmitted = 1,
  kSubmittedWaiting = 2,
  kDone = 3,
  kFailed = 4,
  kRegrouped = 5,
  kDeferred = 6
};
constexpr bool is_over(uint32_t state) {
  return state >= kDone && state <= kRegrouped;
}

struct alignas(64) Slot {
  std::atomic<uint32_t> state;  // futex word of the waiting rank
  uint32_t generation;          // of its submission: the low half of the number
  int64_t submitted_ns;         // CLOCK_MONOTONIC; by the rank
  int64_t started_ns;           // by the daemon: all local members had submitted
  int64_t done_ns;              // by the daemon
  Descriptor descriptor;
};
static_assert(sizeof(Slot) == 192, "part of the shared layout");

struct RankChannel {
  uint32_t member;
  alignas(64) std::atomic<uint64_t> tail;  // operations handed over so far; written by the rank
  alignas(64) uint32_t ring[kSlots];       // slot numbers, in the order of submission; written by the rank
  // Written by the rank, for engine/job/circle.h and for people.
  alignas(64) std::atomic<uint32_t> main_waits;  // 1 + the slot for which the main thread of the process waits; 0: none
  std::atomic<uint32_t> other_threads;           // 1: another thread of it has submitted operations
  std::atomic<uint64_t> passes;                  // backward passes of wrapped models that it has begun
  Slot slots[kSlots];
};

struct Counters {
  std::atomic<uint64_t> bytes_local;     // input bytes of local ranks' operations
  std::atomic<uint64_t> bytes_sent;      // to other hosts, headers included
  std::atomic<uint64_t> bytes_received;  // from other hosts
  std::atomic<uint64_t> ops;             // operations completed here (one for all local members together)
  std::atomic<uint64_t> frames_dropped;
  std::atomic<uint64_t> bad_connections;  // closed because of what they said, Unix and TCP
  std::atomic<uint64_t> segment_bytes;    // tensor memory handed out now
  std::atomic<uint64_t> comm_ns;          // time during which at least one operation was running
  std::atomic<uint64_t> residual_bytes;   // memory of error feedback held now
  std::atomic<uint64_t> bytes_encrypted;  // of bytes_sent, those on encrypted connections
  std::atomic<uint64_t> frames_refused;   // damaged or not authentic: the first of them fails the job
};

// Collectives of one communicator that each local rank has submitted, by its position among the host's ranks.
struct alignas(64) Arrivals {
  std::atomic<uint64_t> submitted[kArrivalRanks];
};

// Small collectives of ranks on one host, without the daemon; see meeting.h.
struct MeetingCall {
  uint64_t count;
  int32_t root;
  uint8_t kind, dtype, op;
};

// Contribution of a rank to a meeting; its vector is in MeetingVectors.
struct Contribution {
  alignas(64) std::atomic<uint32_t> number;  // of the meeting; written after the rest
  MeetingCall call;
};

struct Seat {
  alignas(64) std::atomic<uint32_t> left;     // the last meeting that the rank has left
  alignas(64) std::atomic<uint32_t> reduced;  // the last meeting for which this rank has written its slice
  Contribution contributions[2];              // of the last two meetings that the rank has come to
};

// Of one communicator.
struct MeetingRoom {
  // Low half: number of a meeting * 4 + MeetingState; futex word of ranks that wait. High half: the last that was met.
  alignas(64) std::atomic<uint64_t> verdict;
  std::atomic<uint32_t> sleepers;
  alignas(64) std::atomic<uint32_t> slices;  // that were written so far; futex word of ranks that wait for one
  std::atomic<uint32_t> slice_sleepers;
  Seat seats[kMeetingRanks];  // by position in the communicator
};

// Vectors of one room. Pages that nobody has touched take no memory.
struct MeetingVectors {
  char brought[kMeetingRanks][2][kMeetingBytes];
  char reduced[kMeetingBytes];
};

struct JobPage {
  // Grows when a generation begins, and when the job ends. Futex word of ranks that wait for the next generation.
  alignas(64) std::atomic<uint32_t> changes;
  std::atomic<uint64_t> planned;  // the newest generation that is planned; 0: there was none
  // Ranks record their next training steps: number of the request << 16 | steps. 0: nobody asks for it.
  std::atomic<uint64_t> trace;
  // Nanoseconds of CLOCK_BOOTTIME at which the lease of this host is over; 0: never. Ranks stop themselves (SIGSTOP)
  // then, in case neither the daemon nor its keeper runs; these let them go on.
  std::atomic<uint64_t> fence;
  alignas(64) std::atomic<uint32_t> doorbell;  // futex word of the dispatchers: grows with every submission
  alignas(64) std::atomic<uint32_t> sleeping;  // a bit for each dispatcher that sleeps or is about to
  alignas(64) Counters counters;
};

// kGenerationSuspended: it has lost somebody, and the next one follows; it may still fail.
enum GenerationStatus : uint32_t { kRunning = 0, kGenerationSuspended = 1, kGenerationFailed = 2 };

struct Words {
  uint32_t length;
  char text[kErrorBytes];
};

// Where a rank is, and who.
struct Place {
  uint32_t host, member;
};

struct GenerationPage {
  uint32_t host_index;
  uint64_t generation;
  uint32_t world_size;
  uint32_t local_ranks;
  uint32_t hosts;
  uint32_t elastic;  // 1: a lost member suspends the generation, and another one may follow
  uint32_t lobby;    // 1: of newcomers, who are in no generation of the job yet
  // GenerationStatus. Futex word of ranks that sleep until the generation fails. The words of a status are there before
  // it is, and stay.
  alignas(64) std::atomic<uint32_t> status;
  Words suspension, error;
  uint32_t ranks[kArrivalRanks];  // of this host, if there are not more
  Place places[kMaxMembers];      // by rank
  Arrivals arrivals[kArrivalComms];
  MeetingRoom rooms[kRooms + 1];
};

// The page, and behind it the vectors of its rooms.
constexpr size_t kVectorsBegin = (sizeof(GenerationPage) + 4095) / 4096 * 4096;
constexpr size_t kGenerationBytes = kVectorsBegin + (kRooms + 1) * sizeof(MeetingVectors);
inline MeetingVectors* vectors_of(GenerationPage* page, uint32_t room) {
  return reinterpret_cast<MeetingVectors*>(reinterpret_cast<char*>(page) + kVectorsBegin) + room;
}

static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == 4, "futex words");
static_assert(std::atomic<uint64_t>::is_always_lock_free, "shared between processes");

}  // namespace bagua
