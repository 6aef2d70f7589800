// An NCCL between processes over Unix sockets, on the streams of the fake CUDA runtime. It counts misuse.
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fake_cuda.h"
#include "fake_nccl_link.h"
#include "kernel/reduce.h"

namespace {

using bagua::DType;
using bagua::ReduceOp;

enum What : uint32_t { kAllReduce = 1, kReduce, kBroadcast, kAllGather, kReduceScatter, kSend, kRecv, kPairs };
constexpr uint32_t kConnect = 100;  // no operation
constexpr int kOk = 0, kSystem = 2, kInternal = 3, kInvalidArgument = 4, kInvalidUsage = 5, kRemote = 6,
              kInProgress = 7;
constexpr std::chrono::milliseconds kConnecting{20};  // what takes time where a real NCCL makes connections

// `busy`: a thread still does what was asked. `id`: the name under which its members have met. `child`: it is being
// made.
struct Comm {
  int ranks = 0, rank = 0, device = 0;
  char about[64] = {};
  std::atomic<bool> aborted{false}, busy{false};
  std::atomic<int> error{kOk}, users{0}, pending{0};
  bool connected = false, finalized = false, blocks = false;
  uint64_t sequence = 0, children = 0;
  std::string id;
  std::atomic<Comm*> child{nullptr};
  fake::Links links;
};
struct Config {
  size_t size;
  unsigned magic, version;
  int blocking, cluster;
};

struct Call {
  What what;
  const char* src;
  char* dst;
  uint64_t count;
  int type, op, root;
};

struct Launch {
  Comm* comm;
  uint64_t sequence;
  std::vector<Call> calls;
};

struct World {
  std::mutex mutex;
  std::set<Comm*> live;
  std::vector<Comm*> made;
  uint64_t misuses = 0, operations = 0, blocking = 0;
  std::string first_misuse;
  std::atomic<bool> hang{false};
};
World& world() {
  static World* const made = new World;
  return *made;
}

thread_local int group_depth = 0;
struct Grouped {
  Comm* comm;
  void* stream;
  Call call;
};
thread_local std::vector<Grouped> grouped;

int misuse(const std::string& what, int code = kInvalidUsage) {
  std::lock_guard<std::mutex> lock(world().mutex);
  if (world().misuses++ == 0) world().first_misuse = what;
  return code;
}

size_t type_bytes(int type) {
  constexpr size_t kBytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  return type >= 0 && type < 10 ? kBytes[type] : 0;
}
DType dtype_of(int type) {
  constexpr DType kTypes[] = {DType::kI8,  DType::kU8,  DType::kI32, DType::kI32, DType::kI64,
                              DType::kI64, DType::kF16, DType::kF32, DType::kF64, DType::kBF16};
  return kTypes[type];
}
ReduceOp op_of(int op) {
  constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kProduct, ReduceOp::kMax, ReduceOp::kMin, ReduceOp::kAvg};
  return kOps[op];
}

class Execution {
 public:
  Execution(Comm* comm, uint64_t sequence) : comm_(comm), n_(static_cast<size_t>(comm->ranks)), sequence_(sequence) {}

  fake::Result run(const std::vector<Call>& calls) {
    std::vector<Call> pairs;
    for (const Call& call : calls) {
      if (call.what == kSend || call.what == kRecv) {
        pairs.push_back(call);
      } else if (const fake::Result result = collective(call); result != fake::Result::kOk) {
        return result;
      }
    }
    return pairs.empty() ? fake::Result::kOk : exchange(pairs);
  }
  const std::string& why() const { return why_; }

 private:
  // Everybody gets everybody's input; what is not needed is thrown away.
  fake::Result collective(const Call& call) {
    const size_t element = type_bytes(call.type), me = static_cast<size_t>(comm_->rank);
    const size_t rows = call.what == kReduceScatter ? n_ : 1, bytes = call.count * element * rows;
    const bool gives = call.what != kBroadcast || comm_->rank == call.root;
    std::vector<std::vector<char>> all(n_);
    std::vector<fake::Piece> pieces;
    const std::vector<char> mine(gives ? call.src : nullptr, gives ? call.src + bytes : nullptr);
    for (size_t peer = 0; peer < n_; ++peer) {
      const size_t comes = call.what == kBroadcast && static_cast<int>(peer) != call.root ? 0 : bytes;
      all[peer].resize(comes);
      if (peer == me) all[peer] = mine;
      if (peer == me) continue;
      const fake::Header header{
          sequence_,  call.what,  static_cast<uint32_t>(call.type), static_cast<uint32_t>(call.op), call.root,
          call.count, mine.size()};
      pieces.push_back({static_cast<int>(peer), mine.data(), mine.size(), all[peer].data(), comes, header});
    }
    const fake::Result result = comm_->links.exchange(&pieces, comm_->aborted, &why_);
    if (result == fake::Result::kOk) finish(call, all);
    return result;
  }

  void finish(const Call& call, const std::vector<std::vector<char>>& all) {
    const size_t bytes = call.count * type_bytes(call.type);
    if (call.what == kBroadcast) {
      if (bytes > 0) memcpy(call.dst, all[static_cast<size_t>(call.root)].data(), bytes);
    } else if (call.what == kAllGather) {
      for (size_t peer = 0; peer < n_ && bytes > 0; ++peer) memcpy(call.dst + peer * bytes, all[peer].data(), bytes);
    } else if (call.what != kReduce || comm_->rank == call.root) {
      const size_t offset = call.what == kReduceScatter ? static_cast<size_t>(comm_->rank) * bytes : 0;
      std::vector<const void*> inputs;
      for (const auto& one : all) inputs.push_back(one.data() + offset);
      void* const target = call.dst;
      bagua::reduce(dtype_of(call.type), op_of(call.op), inputs.data(), comm_->ranks, &target, 1, call.count,
                    comm_->ranks, false);
    }
  }

  fake::Result exchange(const std::vector<Call>& pairs) {
    std::vector<fake::Piece> pieces;
    std::vector<char> own;
    for (int peer = 0; peer < comm_->ranks; ++peer) {
      fake::Piece piece{peer, nullptr, 0, nullptr, 0, {sequence_, kPairs, 0, 0, 0, 0, 0}};
      bool any = false;
      for (const Call& call : pairs) {
        if (call.root != peer) continue;
        any = true;
        const uint64_t bytes = call.count * type_bytes(call.type);
        if (call.what == kSend) piece.out = call.src, piece.out_bytes = piece.header.payload = bytes;
        if (call.what == kRecv) piece.in = call.dst, piece.in_bytes = bytes;
      }
      if (!any) continue;
      if (peer == comm_->rank) {
        if (piece.out_bytes != piece.in_bytes) return fake::Result::kMismatch;
        memmove(piece.in, piece.out, piece.in_bytes);
      } else {
        pieces.push_back(piece);
      }
    }
    return comm_->links.exchange(&pieces, comm_->aborted, &why_);
  }

  Comm* const comm_;
  const size_t n_;
  const uint64_t sequence_;
  std::string why_;
};

void run_launch(void* context) {
  std::unique_ptr<Launch> launch(static_cast<Launch*>(context));
  Comm* const comm = launch->comm;
  Execution execution(comm, launch->sequence);
  fake::Result result = fake::Result::kGone;
  if (!world().hang && comm->error == kOk) result = execution.run(launch->calls);
  if (result == fake::Result::kMismatch) misuse("members called different things: " + execution.why());
  if (result != fake::Result::kOk && !world().hang && !comm->aborted) {
    comm->error = result == fake::Result::kMismatch ? kInvalidUsage : kRemote;
  }
  // A kernel that lost its peer spins until it is aborted.
  while (result != fake::Result::kOk && !comm->aborted) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  comm->pending.fetch_sub(1);
}

bool alive(Comm* comm) {
  std::lock_guard<std::mutex> lock(world().mutex);
  return world().live.count(comm) != 0;
}

int enqueue(Comm* comm, void* stream, std::vector<Call> calls) {
  comm->pending.fetch_add(1);
  {
    std::lock_guard<std::mutex> lock(world().mutex);
    world().operations += calls.size();
    if (comm->blocks) world().blocking += calls.size();
  }
  fake_cuda_enqueue(stream, &run_launch, new Launch{comm, comm->sequence++, std::move(calls)});
  return kOk;
}

// As a real NCCL, with FAKE_NCCL_CONNECTS=1: connections need all members of the collective.
int connect(Comm* comm, const std::vector<Call>& calls) {
  static const bool wanted = getenv("FAKE_NCCL_CONNECTS") != nullptr;
  if (!wanted || calls.front().what == kSend || calls.front().what == kRecv) return kOk;
  std::vector<fake::Piece> pieces;
  for (int peer = 0; peer < comm->ranks; ++peer) {
    if (peer != comm->rank) pieces.push_back({peer, nullptr, 0, nullptr, 0, {UINT64_MAX, kConnect, 0, 0, 0, 0, 0}});
  }
  std::string why;
  return comm->links.exchange(&pieces, comm->aborted, &why) == fake::Result::kOk ? kOk : kRemote;
}

// The first group of a communicator makes connections: in the background, and what it enqueues is not there before.
int launch(Comm* comm, void* stream, std::vector<Call> calls) {
  if (std::exchange(comm->connected, true)) return enqueue(comm, stream, std::move(calls));
  comm->busy = true;
  comm->pending.fetch_add(1);
  std::thread([comm, stream, calls = std::move(calls)] {
    std::this_thread::sleep_for(kConnecting);
    const int code = connect(comm, calls);
    if (code != kOk && !comm->aborted) comm->error = code;
    if (code == kOk && !comm->aborted) enqueue(comm, stream, calls);
    comm->busy = false;
    comm->pending.fetch_sub(1);
  }).detach();
  return kInProgress;
}

// A communicator that blocks returns when it is done.
int when_done(Comm* comm, int code) {
  if (code != kInProgress || !comm->blocks) return code;
  while (comm->busy && !comm->aborted) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return comm->aborted ? kInternal : comm->error.load();
}

bool usable(Comm* comm, const char* what) {
  if (!alive(comm)) {
    misuse(std::string(what) + " on a communicator that was destroyed or aborted");
    return false;
  }
  if (!comm->busy && !comm->finalized) return true;
  misuse(std::string(what) + " before the communicator was ready, or after ncclCommFinalize");
  return false;
}

int call(void* handle, void* stream, const Call& one) {
  Comm* const comm = static_cast<Comm*>(handle);
  if (!usable(comm, "an operation")) return kInvalidArgument;
  if (comm->users.fetch_add(1) != 0) misuse("two threads use one communicator at once");
  int code = kOk;
  if (type_bytes(one.type) == 0 || one.root >= comm->ranks || one.op > 4) {
    code = misuse("an argument that NCCL does not know", kInvalidArgument);
  } else if (group_depth > 0) {
    grouped.push_back({comm, stream, one});
  } else if ((one.what == kSend || one.what == kRecv) && one.root == comm->rank) {
    code = misuse("a send to itself outside a group");
  } else {
    code = launch(comm, stream, {one});
  }
  comm->users.fetch_sub(1);
  return when_done(comm, code);
}

// Two members with one GPU, which NCCL refuses.
bool duplicates(const std::vector<char>& all, int ranks) {
  for (int a = 0; a < ranks; ++a) {
    for (int b = 0; b < a; ++b) {
      if (memcmp(all.data() + 64 * a, all.data() + 64 * b, 64) == 0) return true;
    }
  }
  return false;
}

void meet(Comm* comm) {
  std::vector<char> all;
  int error = kOk;
  if (comm->links.connect(comm->id, comm->ranks, comm->rank, comm->aborted, comm->about, &all) != fake::Result::kOk) {
    error = kRemote;
  } else if (duplicates(all, comm->ranks)) {
    error = kInvalidUsage;
  }
  comm->error = error;
  comm->busy = false;
  comm->pending.fetch_sub(1);
}

}  // namespace

#define FAKE extern "C" __attribute__((visibility("default")))
struct Id {
  char bytes[128];
};

FAKE int ncclGetVersion(int* version) {
  const char* const given = getenv("FAKE_NCCL_VERSION");  // 2.29.7 without it
  *version = given != nullptr ? atoi(given) : 22907;
  return kOk;
}
FAKE int ncclGetUniqueId(Id* id) {
  if (getenv("FAKE_NCCL_NO_ID") != nullptr) return kSystem;
  std::random_device random;
  memset(id, 0, sizeof(*id));
  const std::string name = "fake-nccl-" + std::to_string(random()) + "-" + std::to_string(getpid());
  memcpy(id->bytes, name.data(), name.size());
  return kOk;
}
// Remembered, as NCCL does since 2.25.
const std::string& host_name() {
  static const std::string name = [] {
    const char* const given = getenv("NCCL_HOSTID");
    return std::string(given != nullptr ? given : "this machine");
  }();
  return name;
}
// FAKE_NCCL_NO_INIT: "1" fails at once, "late" after a while; others wait for this member until they abort.
FAKE int ncclCommInitRankConfig(void** out, int ranks, Id id, int rank, Config* config) {
  if (config == nullptr || config->magic != 0xcafebeef || config->size < 24 || config->version < 21400) {
    return misuse("a wrong ncclConfig_t", kInvalidArgument);
  }
  if (config->blocking < 0 || config->blocking > 1 || config->cluster != INT_MIN) return misuse("odd settings");
  if (id.bytes[0] == '\0' || rank < 0 || rank >= ranks) return misuse("a communicator without id", kInvalidArgument);
  const char* const fails = getenv("FAKE_NCCL_NO_INIT");
  if (fails != nullptr && strcmp(fails, "late") != 0) return kSystem;
  Comm* const comm = new Comm;
  comm->ranks = ranks;
  comm->rank = rank;
  fake_cuda_here(&comm->device, comm->about, 32);
  strncpy(comm->about + 32, host_name().c_str(), 31);
  comm->blocks = config->blocking != 0;
  comm->id = id.bytes;
  comm->busy = true;
  comm->pending.fetch_add(1);
  {
    std::lock_guard<std::mutex> lock(world().mutex);
    world().live.insert(comm);
    world().made.push_back(comm);
  }
  std::thread([comm, fails] {
    if (fails == nullptr) return meet(comm);
    std::this_thread::sleep_for(kConnecting);
    comm->error = kSystem;
    comm->busy = false;
    comm->pending.fetch_sub(1);
  }).detach();
  *out = comm;
  return when_done(comm, kInProgress);
}
// The child is there when the parent is ready again. FAKE_NCCL_NO_SPLIT: "1" fails at once, "late" after a while.
// Others wait for this member until they abort the parent.
FAKE int ncclCommSplit(void* handle, int color, int key, void** out, Config* config) {
  Comm* const parent = static_cast<Comm*>(handle);
  if (!usable(parent, "ncclCommSplit")) return kInvalidArgument;
  if (config == nullptr || config->magic != 0xcafebeef || config->version < 21400)
    return misuse("a wrong ncclConfig_t");
  if (color != 0 || key != parent->rank) return misuse("a child of other members or in another order");
  const char* const fails = getenv("FAKE_NCCL_NO_SPLIT");
  if (fails != nullptr && strcmp(fails, "late") != 0) return kSystem;
  Comm* const child = new Comm;
  child->ranks = parent->ranks;
  child->rank = parent->rank;
  child->device = parent->device;
  memcpy(child->about, parent->about, sizeof(child->about));
  child->blocks = config->blocking != 0;
  child->id = parent->id + "-" + std::to_string(++parent->children);
  child->busy = true;
  *out = nullptr;
  parent->child = child;
  parent->busy = true;
  parent->pending.fetch_add(1);
  std::thread([parent, child, fails, out] {
    child->pending.fetch_add(1);
    if (fails == nullptr) {
      meet(child);
    } else {
      std::this_thread::sleep_for(kConnecting);
      child->error = kSystem;
    }
    if (child->error == kOk) {
      std::lock_guard<std::mutex> lock(world().mutex);
      world().live.insert(child);
      world().made.push_back(child);
      *out = child;
    } else {
      parent->error = child->error.load();
    }
    parent->child = nullptr;
    parent->busy = false;
    parent->pending.fetch_sub(1);
  }).detach();
  return when_done(parent, kInProgress);
}
// It frees memory of the device, which waits for all that the device does: for kernels of other communicators, too.
FAKE int ncclCommAbort(void* handle) {
  Comm* const comm = static_cast<Comm*>(handle);
  std::vector<Comm*> made;
  {
    std::lock_guard<std::mutex> lock(world().mutex);
    if (world().live.erase(comm) == 0) {
      if (world().misuses++ == 0) world().first_misuse = "ncclCommAbort of a communicator that does not exist";
      return kInvalidArgument;
    }
    made = world().made;
  }
  comm->aborted = true;  // leaked: whatever runs on a stream may look at it
  if (Comm* const child = comm->child; child != nullptr) child->aborted = true;
  for (Comm* const one : made) {
    while (one->device == comm->device && one->pending != 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return kOk;
}
FAKE int ncclCommFinalize(void* handle) {
  Comm* const comm = static_cast<Comm*>(handle);
  if (!usable(comm, "ncclCommFinalize")) return kInvalidArgument;
  comm->finalized = true;
  comm->busy = true;
  std::thread([comm] {
    while (comm->pending != 0 && !comm->aborted) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    comm->busy = false;
  }).detach();
  return when_done(comm, kInProgress);
}
FAKE int ncclCommDestroy(void* handle) {
  Comm* const comm = static_cast<Comm*>(handle);
  if (!alive(comm)) return misuse("ncclCommDestroy of a communicator that does not exist", kInvalidArgument);
  if (!comm->finalized || comm->busy) misuse("ncclCommDestroy before ncclCommFinalize was over");
  std::lock_guard<std::mutex> lock(world().mutex);
  world().live.erase(comm);
  return kOk;
}
FAKE int ncclCommGetAsyncError(void* handle, int* error) {
  if (!alive(static_cast<Comm*>(handle))) return misuse("ncclCommGetAsyncError after the end", kInvalidArgument);
  Comm* const comm = static_cast<Comm*>(handle);
  if (comm->users.fetch_add(1) != 0) misuse("two threads use one communicator at once");
  *error = comm->busy ? kInProgress : comm->error.load();
  comm->users.fetch_sub(1);
  return kOk;
}
FAKE const char* ncclGetLastError(void*) {
  return getenv("FAKE_NCCL_NO_INIT") != nullptr ? "no network that this fake likes" : "";
}
FAKE const char* ncclGetErrorString(int code) {
  constexpr const char* kTexts[] = {"no error",
                                    "unhandled cuda error",
                                    "unhandled system error",
                                    "internal error",
                                    "invalid argument",
                                    "invalid usage",
                                    "remote process exited or there was a network error"};
  return code >= 0 && code < 7 ? kTexts[code] : "unknown";
}
FAKE int ncclGroupStart() {
  ++group_depth;
  return kOk;
}
FAKE int ncclGroupEnd() {
  if (group_depth == 0) return misuse("ncclGroupEnd without ncclGroupStart");
  if (--group_depth > 0) return kOk;
  std::vector<Grouped> taken;
  taken.swap(grouped);
  int code = kOk;
  while (!taken.empty()) {
    const Grouped first = taken.front();
    std::vector<Call> calls;
    std::vector<Grouped> rest;
    for (const Grouped& one : taken) {
      if (one.comm == first.comm && one.stream != first.stream) misuse("a group on two streams of one communicator");
      if (one.comm->blocks != first.comm->blocks) misuse("a group of communicators that block and others that don't");
      if (one.comm == first.comm) calls.push_back(one.call);
      if (one.comm != first.comm) rest.push_back(one);
    }
    const int one = when_done(first.comm, launch(first.comm, first.stream, calls));
    if (one != kOk) code = one;
    taken.swap(rest);
  }
  return code;
}
FAKE int ncclAllReduce(const char* src, char* dst, size_t n, int type, int op, void* comm, void* stream) {
  return call(comm, stream, {kAllReduce, src, dst, n, type, op, -1});
}
FAKE int ncclReduce(const char* src, char* dst, size_t n, int type, int op, int root, void* comm, void* stream) {
  return call(comm, stream, {kReduce, src, dst, n, type, op, root});
}
FAKE int ncclBroadcast(const char* src, char* dst, size_t n, int type, int root, void* comm, void* stream) {
  return call(comm, stream, {kBroadcast, src, dst, n, type, 0, root});
}
FAKE int ncclAllGather(const char* src, char* dst, size_t n, int type, void* comm, void* stream) {
  return call(comm, stream, {kAllGather, src, dst, n, type, 0, -1});
}
FAKE int ncclReduceScatter(const char* src, char* dst, size_t n, int type, int op, void* comm, void* stream) {
  return call(comm, stream, {kReduceScatter, src, dst, n, type, op, -1});
}
FAKE int ncclSend(const char* src, size_t n, int type, int peer, void* comm, void* stream) {
  return call(comm, stream, {kSend, src, nullptr, n, type, 0, peer});
}
FAKE int ncclRecv(char* dst, size_t n, int type, int peer, void* comm, void* stream) {
  return call(comm, stream, {kRecv, nullptr, dst, n, type, 0, peer});
}

#define COUNT(name, value)                           \
  FAKE uint64_t fake_nccl_##name(void) {             \
    std::lock_guard<std::mutex> lock(world().mutex); \
    return world().value;                            \
  }
COUNT(communicators, live.size())
COUNT(operations, operations)
COUNT(blocking, blocking)
COUNT(misuses, misuses)
FAKE const char* fake_nccl_first_misuse(void) {
  std::lock_guard<std::mutex> lock(world().mutex);
  return world().first_misuse.c_str();
}
FAKE void fake_nccl_hang(int on) {
  world().hang = on != 0;
}
