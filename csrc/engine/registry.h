// The communicators of an engine: the world from the start, others as the ranks declare them.
//
// Thread safety: any thread. mutex_ is held while a communicator is made or dropped, never while one works.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "base/status.h"
#include "engine/communicator.h"

namespace bagua {

class Registry {
 public:
  // Called for every new communicator before anybody can use it: gives those of several hosts their executor.
  using Prepare = std::function<void(Communicator*)>;

  Registry(const std::vector<std::vector<int>>& hosts, int host_index, Prepare prepare);

  // Makes the world.
  void open();
  // `rank` declares communicator `id`; the first declaration makes it, the others must say the same.
  Status declare(int rank, uint64_t id, const std::vector<int>& members);
  // `rank` will not use it any more; returns the communicator once the last local member has said so.
  Status destroy(int rank, uint64_t id, std::shared_ptr<Communicator>* dropped);
  // nullptr if there is none.
  std::shared_ptr<Communicator> find(uint32_t id) const;
  std::vector<std::shared_ptr<Communicator>> all() const;
  // Takes all out: the engine is being closed.
  std::vector<std::shared_ptr<Communicator>> clear();

 private:
  struct Entry {
    std::shared_ptr<Communicator> comm;
    std::set<int> declared, destroyed;  // local ranks
  };

  const std::vector<std::vector<int>> hosts_;
  const int host_index_;
  const Prepare prepare_;

  mutable std::mutex mutex_;
  std::map<uint32_t, Entry> comms_;
  std::set<uint32_t> used_;  // numbers of communicators that are gone: frames on the way must not meet a namesake
};

}  // namespace bagua
