// Streams that are attached to a mesh, and peers that should have connected by now.
//
// Thread safety: attach() from any thread; everything else from the thread that drives the mesh. mutex_ guards what
// attach() leaves for that thread.
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

  // Leaves a stream for adopt(); closes it after close().
  void attach(int peer, int stream, Connection connection);
  // Makes the streams that were left here parts of their peers.
  void adopt();
  // No more of them.
  void close();

  bool complete() const { return missing_ == 0; }
  // From now on the peer must connect within the timeout.
  void need(Peer* peer);
  // kTimeout names a peer that has not connected in time.
  Status overdue(int64_t now, int* peer) const;
  // When overdue() is to be called again at the latest; -1: no time matters.
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
