// Measures how long this rank has been waiting for other ranks.
//
// It covers waiting threads of the leg, and operations that a caller waits for. It only measures: the Python side
// decides whether to give up on ranks that live but never come.
//
// Thread safety: any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>

#include "base/mutex.h"

namespace bagua::device {

struct Waiting {
  int64_t since_ns = 0;  // CLOCK_MONOTONIC; 0: nothing waits
  std::string what;      // text for people; empty if the daemon knows more
};

class WaitClock {
 public:
  // longest() calls `look`, on any thread, to get its longest wait.
  uint64_t add(std::function<Waiting()> look);
  // When it returns, `look` is not running and will not run again.
  void remove(uint64_t id);
  // The longest of all waits.
  Waiting longest();

  // RAII: counts the thread as waiting while in scope.
  class Scope {
   public:
    Scope(WaitClock* clock, std::string what);
    ~Scope() { clock_->remove(id_); }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    WaitClock* const clock_;
    const uint64_t id_;
  };

 private:
  Mutex mutex_;  // held while `look` runs
  uint64_t next_ GUARDED_BY(mutex_) = 1;
  std::map<uint64_t, std::function<Waiting()>> looks_ GUARDED_BY(mutex_);
};

}  // namespace bagua::device
