// Which generation of a job follows on this host, for whom, and when.
//
// A generation that follows a loss begins at once. A planned one begins when all members of the present generation that
// are here wait for it, and all newcomers here that it takes in: ranks agree among themselves after which step they do,
// so it is the same step everywhere. A member that waits because somebody was lost may have to repeat its step, in
// which newcomers can't take part: then the plan does not come about here. A later generation takes its place.
//
// Newcomers run in a lobby, which is the present "generation" on a host that has no other, and stands beside it
// elsewhere.
//
// Pure: no threads, no time, no memory but its own. tests/native/engine/succession_test.cpp searches it exhaustively.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/values/options.h"

namespace bagua {

struct Plan {
  Membership next;                 // of a hold, or of others only, the number alone
  std::vector<std::string> peers;  // addresses of all its hosts
  bool here = true;                // false: it goes on without this host
  bool hold = false;               // members wait at the boundary for a later one

  bool takes(int member) const { return here && !hold && next.rank_of(member) >= 0; }
};

class Succession {
 public:
  enum class Answer {
    kWait,       // there is no generation after its own yet
    kReady,      // the same; a newcomer says so for the first time
    kEnter,      // the present generation
    kDismissed,  // a plan goes on without it
    kLeftOut,    // a generation that followed a loss goes on without it
    kUnready,    // its lobby lost somebody before it was ready
  };

  // The first generation, or lobby, of this host.
  explicit Succession(const Membership& first);

  // Number of the newest generation that has come about here, or has dismissed all of this host.
  uint64_t newest() const { return std::max(present_.generation, dismissed_by_); }
  // Members that have a place here: of the present generation and of the lobby.
  std::vector<int> known() const;
  bool in_lobby(int member) const;

  // Whether a lobby of these newcomers may be opened; then opens it.
  Status check_lobby(const std::vector<int>& members) const;
  void open_lobby(const std::vector<int>& members);
  // kInvalid: it can't follow.
  Status plan(Plan plan);
  void forget_plan() { plan_.reset(); }
  // Whether a generation that follows a loss may begin now.
  Status check_next(uint64_t generation) const;
  // The plan whose time has come; nullptr: none.
  const Plan* due() const;
  // Whether a generation takes in newcomers of the lobby, which then ends.
  bool empties_lobby(const Membership& next) const;
  // It begins here.
  void begin(const Membership& next);
  // The plan that is due goes on without this host.
  void dismiss();
  bool dismissed(int member) const { return dismissed_.count(member) > 0; }

  void joined(int member);
  void gone(int member, bool lost);
  // `member` asks for a generation after that one. `lost`: its own is suspended since it lost somebody.
  Answer enter(int member, uint64_t after, bool lost);

 private:
  friend struct SuccessionKey;  // of its test

  struct Group {
    uint64_t generation = 0;
    std::set<int> members;
    bool lobby = false;
    bool lost = false;  // a lobby that has lost somebody
  };

  Group* group_of(int member);
  bool awaited(int member) const { return here_.count(member) > 0 && waiting_.count(member) == 0; }

  Group present_;
  Group lobby_;  // beside the present generation; no members: there is none
  std::optional<Plan> plan_;
  std::set<int> here_;       // joined, and not gone
  std::set<int> waiting_;    // have asked for what is not there yet
  std::set<int> unsettled_;  // of these, those that first asked after a loss
  std::set<int> ready_;      // newcomers that have said so
  std::set<int> dismissed_;  // by plans
  // Of the present generation, in good order. Members leave together, at the end of their program: a plan comes too
  // late for them, and newcomers would wait for them in vain.
  std::set<int> left_;
  uint64_t dismissed_by_ = 0;  // the plan that has dismissed all
};

}  // namespace bagua
