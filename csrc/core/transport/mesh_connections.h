// Takes over attached streams, and finds peers that have not connected in time.
//
// Thread safety: any thread may call attach(); only the thread that drives the mesh may call the rest. mutex_ guards
// the streams that attach() leaves for that thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "base/mutex.h"
#include "base/status.h"
#include "transport/connection.h"
#include "transport/mesh_outbox.h"
#include "transport/mesh_poller.h"
#include "transport/mesh_shared.h"

namespace bagua::mesh {

class Connections {
 public:
  Connections(Shared* shared, Poller* poller, Outbox* outbox);

  // Leaves a stream for adopt(). After close() it closes the stream instead.
  void attach(int peer, int stream, Connection connection);
  // Moves the streams left by attach() to their peers.
  void adopt();
  // Refuses all later streams.
  void close();

  bool complete() const { return missing_ == 0; }
  // Starts the connect timeout of the peer.
  void need(Peer* peer);
  // Returns kTimeout, with a name, if a peer has not connected in time; `peer` is its number then.
  Status overdue(int64_t now, int* peer) const;
  // When overdue() must be called again at the latest; -1: no limit.
  int64_t deadline() const;

 private:
  struct Attached {
    int peer;
    int stream;
    Connection connection;
  };

  void add(int peer, int index, Connection connection);
  bool awaited(const Peer& peer) const { return peer.needed_ns >= 0 && peer.attached < shared_->options.streams; }

  Shared* const shared_;
  Poller* const poller_;
  Outbox* const outbox_;
  int missing_;  // data streams that are not attached yet

  Mutex mutex_;
  std::vector<Attached> attached_ GUARDED_BY(mutex_);
  bool closed_ GUARDED_BY(mutex_) = false;
  std::atomic<bool> any_{false};  // attached_ is not empty
};

}  // namespace bagua::mesh
