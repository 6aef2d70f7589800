// NVIDIA's own NCCL, without a GPU: it loads a network and sends over it with its own proxies, as in a job of two
// ranks.
//
//   real_nccl LIBNCCL load                       three times: networks are looked for, taken, given back
//   real_nccl LIBNCCL traffic [spoil]            LL and Simple over two channels; spoil: with a wrong bit
//   real_nccl LIBNCCL free                       connections are given back while their requests are pending
//   real_nccl LIBNCCL measure SIZE[,SIZE...]     microseconds for a slice of Simple
//
// Played here: the two GPUs (threads that fill and empty the proxies' buffers by the rules of NCCL's kernels), what the
// proxy's service thread hands to setup and connect, and CUDA's memory. The environment chooses the network.
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "nccl_net/real_nccl/layout.h"
#include "nccl_net/real_nccl/library.h"

namespace bagua::nccl_net::real {
namespace {

constexpr int kChannels = 2;
constexpr int kLimitS = 100;  // then SIGALRM ends it: who loses a byte makes NCCL wait for ever

// --- CUDA's memory ---

constexpr char kElse = 0x5a;  // in memory that was given back and belongs to somebody else now

std::mutex memory_mutex;
std::map<void*, size_t> in_use;      // memory_mutex
std::map<void*, size_t> given_back;  // memory_mutex

Result get_device(int* device) {
  *device = 0;
  return 0;
}

Result host_calloc(char** pointer, size_t size, const char*, int) {
  void* memory = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (memory == MAP_FAILED) fail("no memory");
  const std::lock_guard<std::mutex> lock(memory_mutex);
  in_use[memory] = size;
  *pointer = static_cast<char*>(memory);
  return 0;
}

// The real one waits for the GPU: time in which a network that did not let go of the memory goes on writing.
Result host_free(void* memory) {
  {
    const std::lock_guard<std::mutex> lock(memory_mutex);
    const auto found = in_use.find(memory);
    if (found == in_use.end()) fail("memory is freed that is not in use");
    std::memset(memory, kElse, found->second);
    given_back.insert(*found);
    in_use.erase(found);
  }
  ::usleep(10'000);
  return 0;
}

Result device_free(char* memory) {
  if (memory != nullptr) fail("device memory is freed, and there is none");
  return 0;
}

// Bytes that somebody wrote to memory after it was given back; lets go of it.
size_t overwritten() {
  const std::lock_guard<std::mutex> lock(memory_mutex);
  size_t count = 0;
  for (const auto& [memory, size] : given_back) {
    const char* bytes = static_cast<char*>(memory);
    for (size_t i = 0; i < size; ++i) count += bytes[i] != kElse;
    ::munmap(memory, size);
  }
  given_back.clear();
  return count;
}

// --- NCCL ---

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};
using Object = std::unique_ptr<void, Free>;

Object zeroed(size_t size) {
  return Object(std::calloc(1, size));
}

void must(Result result, const char* what) {
  if (result != 0) fail("%s: error %d", what, result);
}

struct Nccl {
  explicit Nccl(const char* path) : library(path), transport(*library.find<Transport*>("netTransport")) {
    int version = 0;
    library.find<Result (*)(int*)>("ncclGetVersion")(&version);
    if (version != BAGUA_REAL_NCCL) fail("this is NCCL %d, and the layouts are those of %d", version, BAGUA_REAL_NCCL);
    if (std::strcmp(transport.name, "NET") != 0) fail("netTransport is another table");
    library.replace("cudaGetDevice", reinterpret_cast<void*>(get_device));
    library.replace_all("_Z23ncclCudaHostCallocDebugIcE", reinterpret_cast<void*>(host_calloc));
    library.replace("cudaFreeHost", reinterpret_cast<void*>(host_free));
    library.replace_all("_Z12ncclCudaFreeIcE", reinterpret_cast<void*>(device_free));
  }

  // As ncclCommInitRank and ncclCommDestroy do it.
  void init(void* comm) const {
    if (BAGUA_REAL_NCCL < 22200) {
      must(library.find<Result (*)()>("_Z17ncclNetPluginInitv")(), "ncclNetPluginInit");
    } else if (BAGUA_REAL_NCCL < 22700) {
      must(library.find<Call>("_Z17ncclNetPluginLoadP8ncclComm")(comm), "ncclNetPluginLoad");
    }
    must(library.find<Call>("_Z11ncclNetInitP8ncclComm")(comm), "ncclNetInit");
  }
  void finalize(void* comm) const {
    if (BAGUA_REAL_NCCL < 22200) return;
    must(library.find<Call>("_Z15ncclNetFinalizeP8ncclComm")(comm), "ncclNetFinalize");
    if (BAGUA_REAL_NCCL < 22700) {
      must(library.find<Call>("_Z19ncclNetPluginUnloadP8ncclComm")(comm), "ncclNetPluginUnload");
    }
  }

  using Call = Result (*)(void* comm);
  Library library;
  const Transport& transport;
};

// A communicator, as far as networks see it.
class Comm {
 public:
  explicit Comm(const Nccl& nccl) : nccl_(nccl), comm_(zeroed(comm::kSize)) {
    comm::netName(get()) = std::getenv("NCCL_NET");  // ncclCommInitRank does this
    comm::trafficClass.set(get(), INT_MIN);          // NCCL_CONFIG_UNDEF_INT
    comm::commHash(get()) = 42;
    nccl.init(get());
  }
  ~Comm() { nccl_.finalize(get()); }
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;

  void* get() const { return comm_.get(); }
  const char* name() const { return *comm::ncclNet(get()); }

 private:
  const Nccl& nccl_;
  Object comm_;
};

// What a rank's proxy knows.
Object proxy_state(const Comm& comm, int rank) {
  static uint32_t abort_flag = 0;
  Object state = zeroed(proxy_state::kSize);
  proxy_state::refCount(state.get()) = 1;
  proxy_state::tpRank(state.get()) = rank;
  proxy_state::tpnRanks(state.get()) = 2;
  proxy_state::tpLocalnRanks(state.get()) = 1;
  proxy_state::p2pnChannels(state.get()) = kChannels;
  proxy_state::nChannels(state.get()) = kChannels;
  for (int i = 0; i < kProtocols; ++i) proxy_state::buffSizes(state.get(), i) = kBufferSizes[i];
  proxy_state::ncclNet(state.get()) = comm::ncclNet(comm.get());
  if (comm::netContext.offset != kAbsent) proxy_state::netContext(state.get()) = comm::netContext(comm.get());
  proxy_state::abortFlag(state.get()) = &abort_flag;
  for (int i = 0; i < kNetAttrs; ++i) proxy_state::netAttr.set(state.get(), kUndefined, i);
  return state;
}

// One end of a channel: its proxy's connection, and what it shares with the GPU.
class End {
 public:
  End(const TransportComm& calls, const Resources& fields, void* state, bool sends)
      : calls_(calls), fields_(fields), state_(state), connection_(zeroed(connection::kSize)) {
    connection::send(connection_.get()) = sends ? 1 : 0;
    connection::transport(connection_.get()) = kTransportNet;
    connection::sameProcess(connection_.get()) = 1;
  }

  void setup(const SetupReq& request, void* handle, int size) {
    SetupReq copy = request;
    int done = 0;
    must(calls_.proxySetup(connection_.get(), state_, &copy, kSetupReqSize, handle, size, &done), "proxySetup");
  }

  // Called until it says true, with the same memory, as NCCL does: networks keep their place in the handle.
  bool connect(void* arguments, size_t size) {
    char map[kConnectMapSize];
    int done = 0;
    const Result result =
        calls_.proxyConnect(connection_.get(), state_, arguments, static_cast<int>(size), map, sizeof map, &done);
    if (result != kInProgress) must(result, "proxyConnect");
    if (done != 0) connection::state(connection_.get()) = kConnConnected;
    return done != 0;
  }

  // As NCCL's proxy, when the communicator goes.
  void free() { must(calls_.proxyFree(connection_.get(), state_), "proxyFree"); }

  void* connection() const { return connection_.get(); }
  char* slot(int protocol, uint64_t step) const {
    const auto size = fields_.buffSizes(resources(), protocol) / kSteps;
    return fields_.buffers(resources(), protocol) + step % kSteps * size;
  }
  uint64_t* head() const { return &kHead(fields_.sendMem(resources())); }
  uint64_t* tail() const { return &kTail(fields_.recvMem(resources())); }
  int64_t* fifo_size(uint64_t step) const { return &kFifoSize(fields_.recvMem(resources()), step % kSteps); }

 private:
  void* resources() const { return connection::transportResources(connection_.get()); }

  const TransportComm& calls_;
  const Resources& fields_;
  void* state_;
  Object connection_;
};

struct Channel {
  End sender;
  End receiver;
  uint64_t step = 0;  // where the last operation ended
};

// Two ranks, the first of which sends to the second.
class World {
 public:
  explicit World(const Nccl& nccl)
      : nccl_(nccl), comms_{{Comm(nccl), Comm(nccl)}}, states_{{proxy_state(comms_[0], 0), proxy_state(comms_[1], 1)}} {
    std::printf("network %s\n", comms_[0].name());
  }

  void connect() {
    for (int i = 0; i < kChannels; ++i) {
      channels.push_back({End(nccl_.transport.send, kSendResources, state(0), true),
                          End(nccl_.transport.recv, kRecvResources, state(1), false)});
      Channel& made = channels.back();
      SendConnectArgs to_sender{};
      RecvConnectArgs to_receiver{};
      for (int& each : to_sender.netAttr) each = kUndefined;
      for (int& each : to_receiver.netAttr) each = kUndefined;
      SetupReq request{};
      request.channelId = i;
      request.tpRank = 1;
      made.receiver.setup(request, to_sender.handle, sizeof to_sender.handle);
      request.tpRank = 0;
      request.tpRemoteRank = 1;
      made.sender.setup(request, nullptr, 0);
      bool sends = false;
      bool receives = false;
      while (!sends || !receives) {
        if (!sends) sends = made.sender.connect(&to_sender, kSendConnectSize);
        if (!receives) receives = made.receiver.connect(&to_receiver, kRecvConnectSize);
      }
    }
  }

  // The receivers' ends or the senders' first.
  void disconnect(bool receivers_first) {
    for (const bool receivers : {receivers_first, !receivers_first}) {
      for (Channel& each : channels) receivers ? each.receiver.free() : each.sender.free();
    }
    channels.clear();
  }

  void* state(int rank) const { return states_[rank].get(); }

  std::vector<Channel> channels;

 private:
  const Nccl& nccl_;
  std::array<Comm, 2> comms_;
  std::array<Object, 2> states_;
};

// --- An operation ---

struct Operation {
  int protocol;
  int slice_steps;
  int chunk_steps;
  int slices;
  uint32_t seed;
  int size = -1;  // of each slice; -1: at random, and the bytes are checked
  bool spoil = false;
};

uint64_t begin_of(const Operation& operation, const Channel& channel) {
  const auto chunk = static_cast<uint64_t>(operation.chunk_steps);
  return (channel.step + chunk - 1) / chunk * chunk;
}

// The sizes of a channel's slices: half of them small, some empty, some full.
std::vector<int> sizes_of(const Operation& operation, int channel) {
  const int full = operation.slice_steps * (kBufferSizes[operation.protocol] / kSteps);
  std::minstd_rand random(operation.seed + static_cast<uint32_t>(channel));
  std::vector<int> sizes(static_cast<size_t>(operation.slices), operation.size);
  if (operation.size >= 0) return sizes;
  for (int& size : sizes) {
    const uint32_t kind = random() % 16;
    const uint32_t value = random();
    size = kind == 0   ? 0
           : kind == 1 ? full
           : kind < 9  ? static_cast<int>(value % 4096)
           : kind < 13 ? static_cast<int>(value % 65536)
                       : static_cast<int>(value % static_cast<uint32_t>(full));
    if (operation.protocol == kLl) size -= size % 16;
  }
  return sizes;
}

// Eight bytes of a slice's contents, which depend on the slice and on their place in it.
uint64_t contents(uint64_t key, size_t place) {
  return (key + place + 1) * 0x9e3779b97f4a7c15;
}

uint64_t key_of(uint64_t step, int channel) {
  return step * 0x2545f4914f6cdd1d + static_cast<uint64_t>(channel);
}

void fill(char* data, size_t size, uint64_t key) {
  for (size_t at = 0; at < size; at += 8) {
    const uint64_t word = contents(key, at);
    std::memcpy(data + at, &word, std::min<size_t>(8, size - at));
  }
}

bool filled(const char* data, size_t size, uint64_t key) {
  bool same = true;
  for (size_t at = 0; at < size; at += 8) {
    const uint64_t word = contents(key, at);
    same &= std::memcmp(data + at, &word, std::min<size_t>(8, size - at)) == 0;
  }
  return same;
}

// LL: four bytes of data and a flag, written and read as one, so that the flag says that the data is there.
uint64_t ll_word(uint64_t key, size_t place, uint32_t flag) {
  return contents(key, place) >> 32 | static_cast<uint64_t>(flag) << 32;
}

template <class T>
T load(const T* from) {
  return __atomic_load_n(from, __ATOMIC_ACQUIRE);
}

template <class T>
void store(T* to, T value) {
  __atomic_store_n(to, value, __ATOMIC_RELEASE);
}

// The sending GPU.
void play_sender(const Channel& channel, int number, const Operation& operation) {
  const End& end = channel.sender;
  const std::vector<int> sizes = sizes_of(operation, number);
  uint64_t step = begin_of(operation, channel);
  bool spoil = operation.spoil && number == 0;
  for (size_t i = 0; i < sizes.size(); ++i, step += operation.slice_steps) {
    while (load(end.head()) + kSteps < step + operation.slice_steps) ::sched_yield();
    char* data = end.slot(operation.protocol, step);
    const auto size = static_cast<size_t>(sizes[i]);
    const uint64_t key = key_of(step, number);
    const int flipped = spoil && size >= 16 ? 1 : 0;
    spoil &= flipped == 0;
    if (operation.protocol == kLl) {
      store(end.fifo_size(step), static_cast<int64_t>(size));
      auto* words = reinterpret_cast<uint64_t*>(data);
      const auto flag = static_cast<uint32_t>(step + 1);
      for (size_t k = 0; k < size / 8; ++k) store(&words[k], ll_word(key, k, flag) ^ (k == 1 ? flipped : 0));
      continue;
    }
    if (operation.size < 0) fill(data, size, key);
    data[size / 2] = static_cast<char>(data[size / 2] ^ flipped);
    store(end.fifo_size(step), static_cast<int64_t>(size));
    store(end.tail(), step + operation.slice_steps);
  }
}

// The receiving GPU. Slices that came wrong are counted.
void play_receiver(const Channel& channel, int number, const Operation& operation, std::atomic<int>* wrong) {
  const End& end = channel.receiver;
  const std::vector<int> sizes = sizes_of(operation, number);
  uint64_t step = begin_of(operation, channel);
  for (size_t i = 0; i < sizes.size(); ++i, step += operation.slice_steps) {
    const char* data = end.slot(operation.protocol, step);
    const auto size = static_cast<size_t>(sizes[i]);
    const uint64_t key = key_of(step, number);
    bool good = true;
    if (operation.protocol == kLl) {
      // As in NCCL's kernels, the flags alone say what has come; the proxy may not have noticed yet.
      const auto* words = reinterpret_cast<const uint64_t*>(data);
      const auto flag = static_cast<uint32_t>(step + 1);
      for (size_t k = 0; k < size / 8; ++k) {
        uint64_t word = load(&words[k]);
        for (; word >> 32 != flag; word = load(&words[k])) ::sched_yield();
        good &= word == ll_word(key, k, flag);
      }
    } else {
      while (load(end.tail()) <= step) ::sched_yield();
      if (operation.size < 0) good = filled(data, size, key);
    }
    if (!good) wrong->fetch_add(1);
    store(end.head(), step + operation.slice_steps);
  }
}

// What a proxy's thread has to do for an operation.
Object proxy_args(const std::vector<Channel>& channels, const Operation& operation, End Channel::* end) {
  Object made = zeroed(args::kSize);
  void* const args = made.get();
  for (int i = 0; i < kChannels; ++i) {
    sub::connection(args, i) = (channels[i].*end).connection();
    sub::channelId(args, i) = i;
    sub::nsteps(args, i) = operation.slices * operation.slice_steps;
    sub::nbytes(args, i) = 1 << 20;
    sub::groupSize(args, i) = 1;
  }
  args::nsubs(args) = kChannels;
  args::sliceSteps(args) = operation.slice_steps;
  args::chunkSteps(args) = operation.chunk_steps;
  args::collAPI(args) = kAllReduce;
  args::protocol(args) = static_cast<uint8_t>(operation.protocol);
  args::algorithm.set(args, kRing);
  args::state(args) = kOpReady;
  args::nChannels.set(args, kChannels);
  args::nPeers.set(args, 1);
  return made;
}

// Carries an operation out: a thread for each rank's proxy, and for each GPU's side of a channel. Returns the seconds.
double run(const Nccl& nccl, World* world, const Operation& operation, std::atomic<int>* wrong) {
  std::vector<std::thread> threads;
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < kChannels; ++i) {
    threads.emplace_back([=] { play_sender(world->channels[i], i, operation); });
    threads.emplace_back([=] { play_receiver(world->channels[i], i, operation, wrong); });
  }
  const auto progress = [&](const TransportComm& calls, int rank, End Channel::* end) {
    const Object args = proxy_args(world->channels, operation, end);
    while (args::state(args.get()) != kOpNone) {
      must(calls.proxyProgress(world->state(rank), args.get()), rank == 0 ? "sendProxyProgress" : "recvProxyProgress");
      if (args::idle(args.get()) != 0) ::sched_yield();
    }
  };
  threads.emplace_back([&] { progress(nccl.transport.send, 0, &Channel::sender); });
  threads.emplace_back([&] { progress(nccl.transport.recv, 1, &Channel::receiver); });
  for (std::thread& each : threads) each.join();
  for (Channel& each : world->channels) {
    each.step = begin_of(operation, each) + static_cast<uint64_t>(operation.slices * operation.slice_steps);
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// --- What is asked for ---

void load(const Nccl& nccl) {
  for (int round = 0; round < 3; ++round) {
    const Comm comm(nccl);
    std::printf("network %s\n", comm.name());
  }
}

int traffic(const Nccl& nccl, bool spoil) {
  World world(nccl);
  world.connect();
  int all = 0;
  for (int i = 0; i < 20; ++i) {
    std::atomic<int> wrong = 0;
    const bool ll = i % 3 == 0;
    const uint32_t seed = 1000 + static_cast<uint32_t>(i);
    // As in NCCL's rings: chunks of one step with LL, of four with Simple, there in slices of one or two.
    Operation operation{ll ? kLl : kSimple, ll ? 1 : i % 3, ll ? 1 : 4, ll ? 600 : 120, seed};
    operation.spoil = spoil;
    run(nccl, &world, operation, &wrong);
    std::printf("%s: %d of %d slices wrong\n", ll ? "LL" : "Simple", wrong.load(), kChannels * operation.slices);
    all += wrong;
  }
  world.disconnect(true);
  if (overwritten() != 0) fail("memory was written after it was given back");
  return all;
}

size_t open_descriptors() {
  const std::filesystem::directory_iterator folder("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(folder), end(folder)));
}

// As when a communicator is aborted: proxies stop where they are, and give everything back.
void free_pending(const Nccl& nccl) {
  World world(nccl);
  const size_t descriptors = open_descriptors();
  constexpr int kRounds = 10;
  constexpr int kSlices = kSteps / 2;  // as many as the GPU may fill before the first is sent
  size_t pending = 0;
  size_t late = 0;
  for (int round = 0; round < kRounds; ++round) {
    world.connect();
    const Operation operation{kSimple, 2, 4, kSlices, static_cast<uint32_t>(round), 1 << 20};
    for (int i = 0; i < kChannels; ++i) {
      for (uint64_t step = 0; step < kSteps; step += 2) fill(world.channels[i].sender.slot(kSimple, step), 1 << 20, 1);
      play_sender(world.channels[i], i, operation);
    }
    const Object sends = proxy_args(world.channels, operation, &Channel::sender);
    const Object receives = proxy_args(world.channels, operation, &Channel::receiver);
    // Until each channel's first bytes are there: the rest is on its way, or comes while memory is given back.
    const auto begun = [&](const Channel& each) { return load(each.receiver.slot(kSimple, 0) + 7) != 0; };
    while (!begun(world.channels[0]) || !begun(world.channels[1])) {
      must(nccl.transport.send.proxyProgress(world.state(0), sends.get()), "sendProxyProgress");
      must(nccl.transport.recv.proxyProgress(world.state(1), receives.get()), "recvProxyProgress");
    }
    for (int i = 0; i < kChannels; ++i) {
      pending += (sub::posted(receives.get(), i) - sub::received(receives.get(), i)) / 2;
    }
    world.disconnect(round % 2 == 0);
    late += overwritten();
  }
  std::printf("%zu receives were pending; bytes written too late: %zu\n", pending, late);
  if (pending == 0) fail("nothing was pending");
  if (late != 0) fail("memory was written after it was given back");
  for (int i = 0; i < 100 && open_descriptors() != descriptors; ++i) ::usleep(10'000);  // helpers end by themselves
  if (open_descriptors() != descriptors) fail("descriptors: %zu before, %zu after", descriptors, open_descriptors());
}

void measure(const Nccl& nccl, const std::string& sizes) {
  World world(nccl);
  world.connect();
  std::atomic<int> wrong = 0;
  for (size_t at = 0; at < sizes.size();) {
    size_t used = 0;
    const int size = std::stoi(sizes.substr(at), &used);
    at += used + 1;
    Operation operation{kSimple, 2, 4, 200, 1, size};
    run(nccl, &world, operation, &wrong);  // warms up
    operation.slices = size < 65536 ? 6000 : size < 524288 ? 3000 : 600;
    std::printf("%d %.2f\n", size, run(nccl, &world, operation, &wrong) / operation.slices * 1e6);
  }
  world.disconnect(true);
}

int main(int count, char** arguments) {
  const std::string mode = count > 2 ? arguments[2] : "";
  const std::string more = count > 3 ? arguments[3] : "";
  if (mode.empty()) fail("usage: real_nccl LIBNCCL load | traffic [spoil] | free | measure SIZE[,SIZE...]");
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // what was done is seen
  ::alarm(kLimitS);
  const Nccl nccl(arguments[1]);
  int wrong = 0;
  if (mode == "load") {
    load(nccl);
  } else if (mode == "traffic") {
    wrong = traffic(nccl, more == "spoil");
  } else if (mode == "free") {
    free_pending(nccl);
  } else if (mode == "measure") {
    measure(nccl, more);
  } else {
    fail("no such mode: %s", mode.c_str());
  }
  std::printf("%d errors\n", wrong);
  return wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace bagua::nccl_net::real

int main(int count, char** arguments) {
  return bagua::nccl_net::real::main(count, arguments);
}
