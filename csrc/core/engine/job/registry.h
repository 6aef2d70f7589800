// The communicators of a generation: the world from the start, others once ranks declare them.
//
// A number may be used again once it is destroyed, and ranks need not be in step: while one still has a communicator,
// another may have destroyed it and declared the next one. Each rank has at most one with a number, and the k-th that
// it declares with a number and certain members is the k-th of all members. The same number with other members, while
// ranks of this host have the old one, is a clash.
//
// Destroyed communicators are kept until their executors have parted from the other hosts.
//
// Thread safety: any thread. mutex_ is held while a communicator is made or dropped, never while one works.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "base/status.h"
#include "engine/local/communicator.h"
#include "engine/values/options.h"

namespace bagua {

class Registry {
 public:
  // Called for every new communicator before anybody can use it: gives those of several hosts their executor.
  using Prepare = std::function<void(Communicator*)>;
  using Comm = std::shared_ptr<Communicator>;

  Registry(const Membership& membership, Prepare prepare);

  // Makes the world.
  void open();
  // `rank` declares communicator `id`; the first declaration makes it, the others must say the same. *room: see
  // Communicator::room. kInvalid: a mistake of this rank alone. kAborted: a clash, after which some members would wait
  // for others for ever.
  Status declare(int rank, uint64_t id, const std::vector<int>& members, uint32_t* room);
  // `rank` will not use it any more; returns the communicator once the last local member has said so, and keeps it
  // until its executor is over.
  Status destroy(int rank, uint64_t id, Comm* dropped);
  // Frees those whose executors are over.
  void reap();

  // The one that `rank` has; nullptr if there is none.
  Comm find(uint32_t id, int rank) const;
  std::vector<Comm> all() const;      // those that are declared
  std::vector<Comm> retired() const;  // those that were destroyed
  // Takes all out, those that were destroyed, too, and makes no more: the generation ends.
  std::vector<Comm> close();
  // Words if host `host` has made an instance of a communicator that clashes with one here.
  std::string clash(uint32_t id, uint64_t instance, int host) const;

 private:
  struct Entry {
    Comm comm;
    std::set<int> declared, destroyed;  // local ranks
    bool used_by(int rank) const { return declared.count(rank) > 0 && destroyed.count(rank) == 0; }
  };

  Status check(int rank, uint64_t id, const std::vector<int>& members) const;
  Status make(int rank, uint32_t id, const std::vector<int>& members, uint32_t* room) REQUIRES(mutex_);
  // Gives it a room if its members may meet, and one is free.
  void give_room(Communicator* comm) REQUIRES(mutex_);

  const Membership& membership_;
  const Prepare prepare_;

  mutable Mutex mutex_;
  std::map<uint32_t, std::vector<Entry>> comms_ GUARDED_BY(mutex_);  // of one number: in the order of their making
  size_t count_ GUARDED_BY(mutex_) = 0;                              // entries in all
  std::map<std::pair<uint32_t, std::vector<int>>, uint32_t> incarnations_
      GUARDED_BY(mutex_);                                    // made so far, where more than one host is in
  std::array<bool, kRooms + 1> rooms_ GUARDED_BY(mutex_){};  // that are in use
  std::vector<Comm> retired_ GUARDED_BY(mutex_);
  bool closed_ GUARDED_BY(mutex_) = false;
};

}  // namespace bagua
