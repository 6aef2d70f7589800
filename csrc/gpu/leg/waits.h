// How long this rank has been waiting for others: of what threads of the leg wait for, and of operations that a caller
// waits for. So that somebody may give up on ranks that live and never come; nothing here does.
//
// Thread safety: any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>

namespace bagua::device {

struct Waiting {
  int64_t since_ns = 0;  // CLOCK_MONOTONIC; 0: nothing waits
  std::string what;      // for people; empty where the daemon knows more
};

class Waits {
 public:
  // `look` says what waits longest. It is asked now and then, from any thread.
  uint64_t add(std::function<Waiting()> look);
  // After it `look` is not running and will not run.
  void remove(uint64_t id);
  // What has been waiting longest.
  Waiting longest();

  // A thread waits as long as it lives.
  class Here {
   public:
    Here(Waits* waits, std::string what);
    ~Here() { waits_->remove(id_); }
    Here(const Here&) = delete;
    Here& operator=(const Here&) = delete;

   private:
    Waits* const waits_;
    const uint64_t id_;
  };

 private:
  std::mutex mutex_;  // guards what follows; held while `look` runs
  uint64_t next_ = 1;
  std::map<uint64_t, std::function<Waiting()>> looks_;
};

}  // namespace bagua::device
