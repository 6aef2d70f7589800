// This rank's channel to its daemon, as the core hands it over (channel/host_api.h), and operations on it.
//
// Thread safety: Host any thread; a Move one thread at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "channel/host_api.h"

namespace bagua::dist {

// `ask(context)` is called every 100 ms of a long wait, and after a signal; true ends the wait.
struct Interrupt {
  bool (*ask)(void*) = nullptr;
  void* context = nullptr;
};

class Host {
 public:
  // `keeper` keeps the channel open. `describe` says who waits for whom, in words; it may be slow.
  Host(const HostApi& api, std::shared_ptr<void> keeper, std::function<std::string()> describe);
  ~Host();
  Host(const Host&) = delete;
  Host& operator=(const Host&) = delete;

  const HostApi& api() const { return api_; }
  StagePool* stages() const { return stages_; }
  std::string describe_waits() const { return describe_(); }
  // Memory that the daemon sees, in which operations copy nothing; nullptr: there is no more. free() gives it back.
  void* alloc(uint64_t bytes, uint64_t* segment) const;
  void free(uint64_t segment) const;

 private:
  const HostApi api_;
  const std::shared_ptr<void> keeper_;
  const std::function<std::string()> describe_;
  StagePool* const stages_;
};

enum class Progress { kMade, kLate, kBusy, kInterrupted };

// One operation of the core. Its memory must stay until it is over or destroyed. Errors are thrown as
// c10::DistBackendError with the core's words.
class Move {
 public:
  Move(std::shared_ptr<Host> host, const TransferRequest& request);
  ~Move();
  Move(const Move&) = delete;
  Move& operator=(const Move&) = delete;

  // Submits what can be submitted now; false: not all of it. Does not wait.
  bool start();
  // Goes on by a piece. kLate: not by the deadline. kBusy: too many operations are in flight.
  Progress step(int64_t deadline_ns, Interrupt interrupt);
  // Instead of the two above: all at once, without the daemon where it is small.
  Progress run(int64_t deadline_ns, Interrupt interrupt);
  bool over() const;
  int source() const;  // of a receive that is over

 private:
  const std::shared_ptr<Host> host_;
  Transfer* const transfer_;
};

}  // namespace bagua::dist
