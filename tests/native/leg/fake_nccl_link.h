// Sockets between the members of one communicator of the fake NCCL.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

namespace fake {

enum class Result { kOk, kGone, kAborted, kMismatch };

// A member's next operation with another one; both ends compare it.
struct Header {
  uint64_t sequence;
  uint32_t what, type, op;
  int32_t root;
  uint64_t count, payload;
};

struct Piece {
  int peer;
  const char* out;
  uint64_t out_bytes;
  char* in;
  uint64_t in_bytes;
  Header header;
};

class Links {
 public:
  ~Links();
  // Connects all members. `about`: 64 bytes of this one; `all` gets those of everybody.
  Result connect(const std::string& name, int ranks, int rank, const std::atomic<bool>& aborted, const char* about,
                 std::vector<char>* all);
  // Sends and receives with several peers at once; headers first, which must be alike but for `payload`.
  Result exchange(std::vector<Piece>* pieces, const std::atomic<bool>& aborted, std::string* why);

 private:
  std::vector<int> sockets_;  // by rank; -1: itself
  int rank_ = 0;
};

}  // namespace fake
