#include "engine/local/host_names.h"

#include <vector>

namespace bagua {

std::string host_text(const Membership& membership, const Communicator& comm, int peer) {
  const int host = comm.job_hosts()[static_cast<size_t>(peer)];
  const std::vector<int>& ranks = membership.hosts[static_cast<size_t>(host)];
  std::string text = "host " + std::to_string(host) + (ranks.size() == 1 ? " (rank " : " (ranks ");
  for (size_t i = 0; i < ranks.size(); ++i) text += (i > 0 ? ", " : "") + std::to_string(ranks[i]);
  return text + ")";
}

}  // namespace bagua
