#include "engine/options.h"

#include <algorithm>
#include <set>

#include "channel/protocol.h"
#include "transport/mesh.h"

namespace bagua {

namespace {

Status invalid_options(const std::string& what) {
  return {Code::kInvalid, "Engine: " + what};
}

Status check_membership(const Membership& membership) {
  const int hosts = static_cast<int>(membership.hosts.size());
  if (hosts == 0) return invalid_options("hosts is empty");
  if (membership.host_index < 0 || membership.host_index >= hosts) {
    return invalid_options("host_index " + std::to_string(membership.host_index) + " is not one of " +
                           std::to_string(hosts));
  }
  std::set<int> ranks;
  for (const auto& there : membership.hosts) {
    if (there.empty()) return invalid_options("every host needs at least one rank");
    for (const int rank : there) {
      if (rank < 0 || !ranks.insert(rank).second) {
        return invalid_options("rank " + std::to_string(rank) + " is there twice");
      }
    }
  }
  if (ranks.size() > kMaxMembers || *ranks.rbegin() != static_cast<int>(ranks.size()) - 1) {
    return invalid_options("the ranks of all hosts must be 0 to n - 1, and at most " + std::to_string(kMaxMembers));
  }
  return Status::ok();
}

}  // namespace

size_t Membership::world_size() const {
  size_t ranks = 0;
  for (const auto& there : hosts) ranks += there.size();
  return ranks;
}

Status check_options(const EngineOptions& options, const Membership& membership) {
  if (Status status = check_membership(membership); !status) return status;
  for (const int rank : membership.local_ranks()) {
    const bool has = std::any_of(options.tokens.begin(), options.tokens.end(), [rank](const auto& token) {
      return token.first == rank && token.second.size() == kTokenBytes;
    });
    if (!has) return invalid_options("rank " + std::to_string(rank) + " needs a token of 32 bytes");
  }
  if (options.streams < 1 || options.streams > Mesh::kMaxStreams) return invalid_options("streams must be 1 to 64");
  if (options.chunk_bytes < 64 || options.chunk_bytes > Mesh::kMaxMessage) {
    return invalid_options("chunk_bytes must be 64 to " + std::to_string(Mesh::kMaxMessage));
  }
  return Status::ok();
}

Status check_next(const Membership& next, const Membership& last) {
  if (Status status = check_membership(next); !status) return status;
  if (next.generation <= last.generation) {
    return invalid_options("generation " + std::to_string(next.generation) + " does not come after " +
                           std::to_string(last.generation));
  }
  if (next.local_ranks() != last.local_ranks()) {
    return invalid_options("the ranks of this host must be the same in all generations");
  }
  return Status::ok();
}

}  // namespace bagua
