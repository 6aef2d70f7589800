// NVIDIA's own NCCL, without a GPU: it loads a network and sends over it with its own proxies, as in a job of two
// ranks.
//
//   real_nccl LIBNCCL load                       three times: networks are looked for, taken, given back
//   real_nccl LIBNCCL traffic                    LL and Simple over two channels
//
// Played: CUDA's memory (memory), what the proxy's service thread hands to setup and connect (world), the two GPUs
// (operation). The environment chooses the network.
#include <unistd.h>

#include <cstdio>
#include <string>

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
  world.disconnect();
  return all;
}

int main(int count, char** arguments) {
  const std::string mode = count > 2 ? arguments[2] : "";
  if (mode.empty()) fail("usage: real_nccl LIBNCCL load | traffic");
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // what was done is seen
  ::alarm(kLimitS);
  const Nccl nccl(arguments[1]);
  int wrong = 0;
  if (mode == "load") {
    load_networks(nccl);
  } else if (mode == "traffic") {
    wrong = traffic(nccl);
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
