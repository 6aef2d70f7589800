// The network of a generation: accepts connections to the job's port, and knows the other hosts' addresses.
//
// Thread safety: any thread. mutex_ is held while a connection is handed over, never while a byte is read. With one
// host nothing is opened.
//
// Strangers cannot hold up others: a connection costs one entry of a poll set until its whole greeting has come, then a
// thread of its own with a deadline. The number of both is bounded, and so is what one address has of them: where there
// are too many, the oldest ones of the address that has most make room.
//
// A host that is ahead of this one connects for communicators that do not exist here yet. Such connections are parked.
// Where no more find room, the other host is told so before its connection is accepted, and asks again.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "base/mutex.h"
#include "base/scarcity.h"
#include "base/status.h"
#include "engine/local/generation_state.h"
#include "net/socket.h"
#include "transport/handshake.h"
#include "transport/seal.h"

namespace bagua {

// Takes the authenticated connections of one communicator.
class ConnectionTarget {
 public:
  virtual ~ConnectionTarget() = default;
  // From host `host` of the job. False: that host is no member.
  virtual bool attach(int host, int stream, Connection connection) = 0;
  // Something that all communicators look at has changed. Must not call the network.
  virtual void wake() = 0;
};

class Network {
 public:
  // Returns an empty text if a connection that host `host` opened for an instance of a communicator may be used here
  // later, else why not. Any thread.
  using Judge = std::function<std::string(uint32_t comm, uint64_t instance, int host)>;

  Network(GenerationState* state, Judge judge) : state_(state), judge_(std::move(judge)) {}
  ~Network() { stop(); }
  Network(const Network&) = delete;
  Network& operator=(const Network&) = delete;

  // Opens the job's port where there are several hosts, and answers it until stop().
  Status open();
  // Ends its threads and closes connections that nobody has taken; the port stays. Idempotent.
  void stop();

  // Addresses of all hosts of the job. kInvalid if they do not fit; the same again is harmless.
  Status set_peers(const std::vector<std::string>& addresses);
  bool peers_known() const { return peers_known_.load(std::memory_order_acquire); }
  std::string peer_address(int host) const;

  // Connections of that instance of communicator `comm` go to `target`, those that came before included, until
  // withdraw().
  void enroll(uint32_t comm, uint64_t instance, ConnectionTarget* target);
  // Wakes every target.
  void wake_targets();
  // No more connections go to its target.
  void withdraw(uint32_t comm, uint64_t instance);

 private:
  struct Waiting {
    Fd socket;
    std::string peer;
    int64_t since_ns;
    bool greeted = false;  // its whole greeting has come
  };
  using Key = std::pair<uint32_t, uint64_t>;  // communicator, instance
  struct Parked {
    int host;
    int stream;
    Connection connection;
    int64_t since_ns;
  };
  struct Handshake {
    std::string peer;
    std::thread thread;
    std::atomic<bool> done{false};
    Mutex mutex;
    int fd GUARDED_BY(mutex) = -1;  // -1 once the handshake is over

    int take();
  };

  int listener() const { return state_->job().listener(); }
  void run();
  void accept_all();
  void expire(int64_t now);
  // Looks how much of its greeting has come. False: drop it.
  bool look(Waiting* waiting, bool ended);
  void shake_greeted();
  void shake(Waiting waiting);
  bool has_room(const PeerInfo& peer);
  void deliver(const PeerInfo& peer, Connection connection);
  void join_finished(bool all);
  bool anybody_parked();
  void judge_parked(int64_t now);
  void count_bad() { state_->job().counters().bad_connections.fetch_add(1, std::memory_order_relaxed); }

  GenerationState* const state_;
  const Judge judge_;
  EventFd wake_;  // stop(), or a handshake is over; constant from open() to stop()
  std::atomic<bool> stopping_{false};
  std::atomic<bool> peers_known_{false};
  std::thread thread_;

  std::vector<Waiting> waiting_;  // acceptor thread only, like the next two
  AcceptPause pause_;
  std::vector<std::unique_ptr<Handshake>> handshakes_;

  mutable Mutex mutex_;
  std::vector<std::string> peers_ GUARDED_BY(mutex_);
  std::map<Key, ConnectionTarget*> targets_ GUARDED_BY(mutex_);
  std::map<Key, std::vector<Parked>> parked_ GUARDED_BY(mutex_);
  size_t parked_count_ GUARDED_BY(mutex_) = 0;
  size_t most_parked_ = 0;  // constant after open()
};

}  // namespace bagua
