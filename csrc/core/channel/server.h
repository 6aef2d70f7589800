// The daemon's end of the engine's Unix socket: lets ranks join, and serves their requests for memory and
// communicators.
//
// Thread safety: one thread of its own runs everything, handler calls included. start() and stop() belong to the owner.
// Nothing that arrives is trusted: a message that is not exactly one of ours closes that connection and is counted.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/fd.h"
#include "base/scarcity.h"
#include "base/status.h"
#include "channel/lifeline.h"
#include "channel/protocol.h"

namespace bagua {

// Functions of the engine that the server calls. Called from the server's thread only; must not block for long.
class ChannelHandler {
 public:
  virtual ~ChannelHandler() = default;
  // Checks the token; gives descriptors of the job's page, the present generation's, and the member's channel.
  virtual Status join(uint32_t member, const uint8_t* token, pid_t pid, Fd descriptors[3]) = 0;
  virtual Status require(int member, uint64_t bytes) = 0;
  // `for_peers`: other members may borrow it.
  virtual Status alloc(int member, uint64_t bytes, bool for_peers, Fd* descriptor, uint64_t* id, uint64_t* size) = 0;
  // A segment that its owner, another local member, has made for peers.
  virtual Status borrow(int member, uint32_t owner, uint64_t id, Fd* descriptor, uint64_t* size) = 0;
  // Takes a segment that the member has from an engine before this one.
  virtual Status adopt(int member, uint64_t id, const Fd& memory) = 0;
  virtual Status free_segment(int member, uint64_t id) = 0;
  // `ranks`: of the present generation.
  // `generation`: the low half of the number of that in which the process asks. kRegrouped: it has ended.
  // *room: in which its members meet; 0: they don't.
  virtual Status declare(int member, uint64_t comm, uint32_t generation, const std::vector<int>& ranks,
                         uint32_t* room) = 0;
  virtual Status destroy(int member, uint64_t comm, uint32_t generation) = 0;
  // The page of a generation after `generation`; kTimeout: there is none yet.
  virtual Status enter(int member, uint64_t generation, Fd* descriptor) = 0;
  // Said goodbye; `words`, for people: what it was handling then, empty if nothing.
  virtual void left(int member, const std::string& words) = 0;
  // Ends in the middle of the job: `text`, for people: why. `lost`: through no fault of the program.
  virtual void failed(int member, pid_t pid, bool lost, const std::string& text) = 0;
  virtual void lost(int member, pid_t pid) = 0;  // died, or broke the protocol
  virtual void bad_connection() = 0;
  virtual void scarce(const std::string& text) = 0;  // there are no descriptors for connections; for the log
};

class ChannelServer {
 public:
  // `uid`: the user whose processes may connect; the socket is theirs.
  ChannelServer(std::string path, ChannelHandler* handler, uid_t uid = getuid())
      : path_(std::move(path)), handler_(handler), uid_(uid) {}
  ~ChannelServer() { stop(); }
  ChannelServer(const ChannelServer&) = delete;
  ChannelServer& operator=(const ChannelServer&) = delete;

  // Creates the socket (mode 0600) and the thread.
  Status start();
  // Ends the thread, closes every connection, removes the socket. Idempotent.
  void stop();

 private:
  struct Connection {
    Fd socket;
    Fd process;                         // pidfd: a forked child may keep the socket open after the rank's death
    std::unique_ptr<DeathWatch> death;  // comes first; nullptr: there is none
    pid_t pid = 0;
    int member = -1;  // -1: has not joined
    int64_t since_ns = 0;
    bool gone = false;
  };

  void run();
  void accept_all();
  void drop_idle(int64_t now);
  void read(Connection* connection);
  bool handle(Connection* connection, const Request& request, const std::vector<int>& ranks, const std::string& words,
              const std::vector<Fd>& passed);
  bool hello(Connection* connection, const Request& request, const std::vector<Fd>& passed);
  // `passed`: n descriptors, three at most.
  bool reply(Connection* connection, const Status& status, uint64_t value = 0, uint64_t bytes = 0,
             const Fd* passed = nullptr, int n = 0);
  void close(Connection* connection, bool misbehaved);

  const std::string path_;
  ChannelHandler* const handler_;
  const uid_t uid_;

  Fd listener_;
  EventFd stop_event_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;

  std::vector<Connection> connections_;  // server thread only
  std::vector<char> buffer_;             // server thread only
  AcceptPause pause_;                    // server thread only
};

}  // namespace bagua
