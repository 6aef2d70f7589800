// Finds local ranks that wait for each other, each in an operation that the next one has not called: none of them can
// ever go on.
//
// A rank's wait is proved if the main thread of its process sleeps there, and no other thread of it has ever
// submitted an operation: nobody is left who could call the one that the others wait for. A rank may give up a wait
// after two seconds (ALONE_S in torch_api/train/model.py), so the same circle must be there for longer.
//
// Thread safety: the dispatcher's thread only.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "engine/job/registry.h"
#include "engine/local/generation_state.h"

namespace bagua {

class Circle {
 public:
  static constexpr int64_t kProofNs = 4'000'000'000;

  Circle(const GenerationState* state, const Registry* registry) : state_(state), registry_(registry) {}

  // Words about a circle that has been there for kProofNs; empty: there is none.
  std::string look(int64_t now);

 private:
  struct Wait {
    int rank = -1;
    uint32_t slot = 0;
    int64_t submitted_ns = 0;
    std::string name;
    std::vector<int> awaited;
    bool same(const Wait& other) const {
      return rank == other.rank && slot == other.slot && submitted_ns == other.submitted_ns;
    }
  };
  using Waits = std::map<int, Wait>;  // by rank

  Waits waits() const;
  static bool wait_of(const Registry& registry, const GenerationState::Local& local, uint32_t generation, Wait* out);
  static std::vector<Wait> find(Waits waits);
  static std::string describe(const std::vector<Wait>& circle);

  const GenerationState* const state_;
  const Registry* const registry_;
  std::vector<Wait> seen_;
  int64_t since_ns_ = 0;
};

}  // namespace bagua
