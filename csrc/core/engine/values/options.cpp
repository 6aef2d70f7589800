#include "engine/values/options.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "channel/protocol.h"
#include "transport/mesh.h"

namespace bagua {

namespace {

Status invalid_options(const std::string& what) {
  return {Code::kInvalid, "Engine: " + what};
}

Status check_numbers(const std::vector<int>& members, size_t world) {
  if (members.empty()) return Status::ok();
  if (members.size() != world) {
    return invalid_options(std::to_string(members.size()) + " members for " + std::to_string(world) + " ranks");
  }
  std::set<int> known;
  for (const int member : members) {
    if (member < 0 || !known.insert(member).second) {
      return invalid_options("member " + std::to_string(member) + " is there twice");
    }
  }
  return Status::ok();
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
  return check_numbers(membership.members, ranks.size());
}

Status check_token(int member, const Tokens& tokens) {
  const bool has = std::any_of(tokens.begin(), tokens.end(), [member](const auto& token) {
    return token.first == member && token.second.size() == kTokenBytes;
  });
  if (has) return Status::ok();
  return invalid_options("member " + std::to_string(member) + " needs a token of 32 bytes");
}

}  // namespace

int Membership::rank_of(int member) const {
  const int world = static_cast<int>(world_size());
  if (members.empty()) return member >= 0 && member < world ? member : -1;
  const auto found = std::find(members.begin(), members.end(), member);
  return found == members.end() ? -1 : static_cast<int>(found - members.begin());
}

int Membership::host_of(int rank) const {
  for (size_t host = 0; host < hosts.size(); ++host) {
    if (std::find(hosts[host].begin(), hosts[host].end(), rank) != hosts[host].end()) return static_cast<int>(host);
  }
  return -1;
}

std::vector<int> Membership::members_of(int host) const {
  std::vector<int> there;
  for (const int rank : hosts[static_cast<size_t>(host)]) there.push_back(member_of(rank));
  return there;
}

std::vector<int> Membership::all_members() const {
  if (!members.empty()) return members;
  std::vector<int> ranks(world_size());
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

std::string Membership::rank_text(int rank) const {
  const int member = member_of(rank);
  return "rank " + std::to_string(rank) + (member == rank ? "" : " (member " + std::to_string(member) + ")");
}

size_t Membership::world_size() const {
  size_t ranks = 0;
  for (const auto& there : hosts) ranks += there.size();
  return ranks;
}

Status check_options(const EngineOptions& options, const Membership& membership) {
  if (Status status = check_members(membership, {}, options.tokens); !status) return status;
  if (membership.lobby && (!options.elastic || membership.hosts.size() != 1)) {
    return invalid_options("newcomers of one host join an elastic job");
  }
  if (options.streams < 1 || options.streams > Mesh::kMaxStreams) return invalid_options("streams must be 1 to 64");
  if (options.chunk_bytes < 64 || options.chunk_bytes > Mesh::kMaxMessage) {
    return invalid_options("chunk_bytes must be 64 to " + std::to_string(Mesh::kMaxMessage));
  }
  return Status::ok();
}

Status check_members(const Membership& membership, const std::vector<int>& known, const Tokens& tokens) {
  if (Status status = check_membership(membership); !status) return status;
  for (const int member : membership.local_members()) {
    if (std::find(known.begin(), known.end(), member) != known.end()) continue;
    if (Status status = check_token(member, tokens); !status) return status;
  }
  return Status::ok();
}

}  // namespace bagua
