// One rank's part of an operation, copied from shared memory and checked; and names of operations for messages.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "channel/layout.h"
#include "channel/memory.h"
#include "engine/values/segments.h"

namespace bagua {

struct Port;

struct Operation {
  Port* port = nullptr;     // where the answer goes
  uint32_t generation = 0;  // in which it was submitted: the low half of the number
  int rank = -1;            // of the member in this generation
  int index = -1;           // in the communicator
  uint32_t slot = 0;
  Descriptor descriptor{};  // private copy: what the rank does to its slot afterwards has no effect
  int64_t submitted_ns = 0;
  uint64_t order = 0;  // sends and receives inside the host: of their arrival in the communicator
  std::shared_ptr<Mapping> src_memory, dst_memory;  // keep src and dst mapped
  const char* src = nullptr;                        // nullptr: this kind reads nothing here
  char* dst = nullptr;

  Kind kind() const { return static_cast<Kind>(descriptor.kind); }
  DType dtype() const { return static_cast<DType>(descriptor.dtype); }
  ReduceOp op() const { return static_cast<ReduceOp>(descriptor.op); }
  size_t bytes() const { return descriptor.count * dtype_size(dtype()); }
};

// One collective operation with the parts of all local members, in their order.
struct Collective {
  uint64_t sequence = 0;  // of the communicator, from 0
  std::vector<Operation> parts;
  int64_t started_ns = 0;

  const Operation& first() const { return parts.front(); }
};

// Checks everything that a rank may have written into a descriptor, and resolves src and dst: known numbers, root in
// range, a codec only where one works, sizes without overflow, memory inside the rank's own segments, aligned, no
// overlap but those that layout.h allows. `operation` has port, rank, index and descriptor; `size` is the number of
// members.
Status resolve(Operation* operation, int size, const SegmentTable& segments);

// Returns true if two ranks have called the same, apart from the data: parts of one operation must agree on it.
bool same_call(const Descriptor& a, const Descriptor& b);

// "world", "communicator 3"
std::string comm_name(uint32_t comm);
// "all-reduce #17 of world (bucket 3)"
std::string operation_name(const Descriptor& descriptor, uint64_t sequence);
// "128 x float32 [128], SUM, root 0"; "128 x float32, AVG, codec onebit with error feedback"
std::string call_text(const Descriptor& descriptor);
std::string label_of(const Descriptor& descriptor);
// "all-reduce #17 of world (bucket 3): rank 1 has been waiting for rank 2 for 3 s\n"
std::string waits_text(const std::string& operation, int rank, int other, int64_t ns);
// kInvalid if a send does not fit the receive of `receiver` that it belongs to.
Status check_pair(const Operation& send, const Descriptor& expected, int receiver, uint64_t sequence);
// The whole sentence about two ranks that called different things as operation `sequence`. `where` may add ", host 1".
std::string mismatch_text(const Descriptor& one, const std::string& who_one, const Descriptor& other,
                          const std::string& who_other, uint64_t sequence);

}  // namespace bagua
