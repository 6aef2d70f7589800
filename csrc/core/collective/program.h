// The program of one host for one collective operation: a list of steps with dependencies, as a pure value.
//
// compile() is pure: it makes the program of one host from the communicator's topology and the request. The programs of
// all hosts match: the k-th message that host a sends to host b is the k-th that b receives from a, and has tag k. An
// executor
//   - starts a step when all steps that it waits for are complete;
//   - starts the sends to one host in the order of the program, and the same for the receives from one host.
// Under these two rules the programs finish even if the network buffers nothing (tests/native/collective_test.cpp runs
// them that way). So parked frames (transport/mesh.h) can't cause a deadlock.
//
// All hosts end with the same bits: either one host computes a result and the others copy it, or each host computes it
// from the same numbers in the same order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "channel/layout.h"
#include "codec/codec.h"

namespace bagua::collective {

// Where the members of a communicator live. Every host has at least one.
struct Topology {
  std::vector<std::vector<int>> members;  // by host: indices in the communicator, ascending
  int host = 0;                           // the host that the program is for
  // Order of the hosts in rings and chains: a permutation of their indices, the same at all hosts. Empty: 0, 1, 2, ...
  std::vector<int> ring = {};

  int hosts() const { return static_cast<int>(members.size()); }
  int size() const;
  int host_of(int index) const;
  // Position of member `index` among the local members, if it is local.
  int position(int index) const;
  const std::vector<int>& local() const { return members[static_cast<size_t>(host)]; }
  // The host at a place of the ring (any integer, modulo the number of hosts), and the place of a host.
  int ring_host(int place) const;
  int ring_place(int host) const;
};

struct Request {
  Kind kind = Kind::kBarrier;
  DType dtype = DType::kF32;
  ReduceOp op = ReduceOp::kSum;
  uint64_t count = 0;
  int root = -1;  // index in the communicator
  // kAllReduce of float32: encoding of messages between hosts, for all but the last `exact` elements.
  Encoding encoding = {};
  bool feedback = false;  // with error feedback: Memory::residual is not null
  uint64_t exact = 0;
};

enum class Space : uint8_t { kSrc, kDst, kScratch, kResidual };

// A reference to memory: `offset` bytes into the src or dst of local member `member` (its position in
// Topology::local()), into the operation's scratch memory, or into this host's residual.
struct Ref {
  Space space;
  uint16_t member;
  uint64_t offset;
};

struct Step {
  enum class Type : uint8_t { kReduce, kCopy, kTranscode, kSend, kRecv };
  Type type;
  bool final = false;                            // kReduce, kTranscode: apply AVG's division
  bool residual = false, message = false;        // kTranscode: whether it has them, one ref each
  int peer = -1;                                 // kSend, kRecv: index of the host among the communicator's
  uint32_t sources = 0;                          // kReduce, kTranscode (raw): n; kCopy, kSend: 1; kRecv: 0
  uint32_t encoded = 0;                          // kTranscode: sources that are messages
  uint32_t destinations = 0;                     // kReduce, kCopy, kTranscode (decoded): m; kRecv: 1; kSend: 0
  uint32_t first_ref = 0;                        // in Program::refs: sources, encoded, residual, message, destinations
  uint32_t waits_for = 0;                        // number of steps that must complete first
  uint32_t first_successor = 0, successors = 0;  // in Program::successors
  uint64_t tag = 0;                              // kSend, kRecv
  uint64_t bytes = 0;                            // of each source and destination; kTranscode: of each raw one
};

// True if a step of this type uses the processor, not the network.
inline bool computes(Step::Type type) {
  return type != Step::Type::kSend && type != Step::Type::kRecv;
}

struct Program {
  std::vector<Step> steps;
  std::vector<Ref> refs;
  std::vector<uint32_t> successors;
  std::vector<int> peers;  // hosts that this host sends to or receives from, ascending
  size_t scratch_bytes = 0;
};

// Chunks have at most `chunk_bytes`, which is at least 64; an encoded message of 1024 elements may be longer. The
// request must be valid, see engine/local/operation.h.
Program compile(const Topology& topology, const Request& request, size_t chunk_bytes);

// Elements of an encoded all-reduce whose results this host makes: [begin, end). Its residual there is what results
// lost, elsewhere what its own contribution lost.
struct OwnBlock {
  uint64_t begin = 0, end = 0;
};
OwnBlock own_block(const Topology& topology, const Request& request);

}  // namespace bagua::collective
