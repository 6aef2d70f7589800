// Settings of an engine: of the job, and the members of one generation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "transport/handshake.h"

namespace bagua {

// Tokens that members show at connect: 32 bytes each, by member number.
using Tokens = std::vector<std::pair<int, std::vector<uint8_t>>>;

// The same for all generations of the job.
struct EngineOptions {
  std::string data_socket;
  Tokens tokens;  // of the local members of the first generation
  Credentials credentials;
  std::string listen;
  int streams = 4;
  size_t chunk_bytes = 512 * 1024;
  int threads = 0;
  uint64_t memory_limit = 0;  // bytes of tensor memory; 0: none but the host's
  int64_t connect_timeout_ns = 30'000'000'000;
  int64_t peer_timeout_ns = 30'000'000'000;  // silence of a host that is waited for; see transport/mesh.h
  bool measure_ring = true;                  // that of host 0 counts; see ring_survey.h
  int memory = -1;                           // a file for what outlives the daemon (vault.h); -1: one of its own
  int64_t rank_uid = -1;                     // the user of the local ranks; -1: this process's
  bool elastic = false;                      // a lost member suspends the generation, and another one may follow
};

// The hosts and ranks of one generation.
struct Membership {
  uint64_t generation = 0;
  int host_index = 0;                   // this host's
  std::vector<std::vector<int>> hosts;  // ranks of every host, in ring order
  std::vector<int> members = {};        // by rank; empty: the same numbers
  bool lobby = false;                   // of newcomers of this host, who are in no generation of the job yet

  const std::vector<int>& local_ranks() const { return hosts[static_cast<size_t>(host_index)]; }
  size_t world_size() const;
  int member_of(int rank) const { return members.empty() ? rank : members[static_cast<size_t>(rank)]; }
  int rank_of(int member) const;  // -1: not in this generation
  int host_of(int rank) const;    // -1: not in this generation
  std::vector<int> members_of(int host) const;
  std::vector<int> all_members() const;  // by rank
  std::vector<int> local_members() const { return members_of(host_index); }
  // "rank 2", or "rank 2 (member 5)" where the numbers differ
  std::string rank_text(int rank) const;
};

// kInvalid in words if they do not fit together.
Status check_options(const EngineOptions& options, const Membership& membership);
// The same for a later generation, or newcomers. `known`: local members that have shown their token; `tokens`: of
// others.
Status check_members(const Membership& membership, const std::vector<int>& known, const Tokens& tokens);

}  // namespace bagua
