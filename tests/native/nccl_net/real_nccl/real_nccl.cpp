// NVIDIA's own NCCL, without a GPU: it loads a network and sends over it with its own proxies, as in a job of two
// ranks.
//
//   real_nccl LIBNCCL load                       three times: networks are looked for, taken, given back
//   real_nccl LIBNCCL traffic                    LL and Simple over two channels
//   real_nccl LIBNCCL free                       connections are given back while their requests are pending
//
// Played: CUDA's memory (memory), what the proxy's service thread hands to setup and connect (world), the two GPUs
// (operation). The environment chooses the network.
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <string>

#include "nccl_net/real_nccl/memory.h"
#include "nccl_net/real_nccl/operation.h"

namespace bagua::nccl_net::real {
namespace {

constexpr int kLimitS = 100;  // then SIGALRM ends it: who loses a byte makes NCCL wait for ever

void load_networks(const Nccl& nccl) {
  for (int round = 0; round < 3; ++round) {
    const Comm comm(nccl);
    std::printf("network %s\n", comm.name());
  }
}

int traffic(const Nccl& nccl) {
  World world(nccl);
  world.connect();
  int all = 0;
  for (int i = 0; i < 20; ++i) {
    std::atomic<int> wrong = 0;
    const bool ll = i % 3 == 0;
    const uint32_t seed = 1000 + static_cast<uint32_t>(i);
    // As in NCCL's rings: chunks of one step with LL, of four with Simple, there in slices of one or two.
    const Operation operation{ll ? kLl : kSimple, ll ? 1 : i % 3, ll ? 1 : 4, ll ? 600 : 120, seed};
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

int main(int count, char** arguments) {
  const std::string mode = count > 2 ? arguments[2] : "";
  if (mode.empty()) fail("usage: real_nccl LIBNCCL load | traffic | free");
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // what was done is seen
  ::alarm(kLimitS);
  const Nccl nccl(arguments[1]);
  int wrong = 0;
  if (mode == "load") {
    load_networks(nccl);
  } else if (mode == "traffic") {
    wrong = traffic(nccl);
  } else if (mode == "free") {
    free_pending(nccl);
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
