// Queues of outgoing messages: for each peer one of control messages and one of chunks. Chooses the stream for the next
// message.
//
// Thread safety: the thread that drives the mesh only.
#pragma once

#include <cstddef>

#include "transport/mesh_losses.h"
#include "transport/mesh_poller.h"
#include "transport/mesh_shared.h"

namespace bagua::mesh {

class Outbox {
 public:
  Outbox(Shared* shared, Poller* poller, Losses* losses) : shared_(shared), poller_(poller), losses_(losses) {}

  // Queues a message behind others of its kind, then calls pump().
  void post(Peer* peer, Outgoing message);
  // Hands queued messages to streams until none is free.
  void pump(Peer* peer);
  // Continues where pump() stopped at its budget.
  void pump_again();
  bool has_more() const { return pump_again_; }
  // The socket of `stream` has room again.
  void on_writable(Stream* stream);

 private:
  void flush(Peer* peer, Stream* stream);
  Stream* control_stream(const Peer& peer) const;
  Stream* data_stream(Peer* peer, size_t chunk);
  void update_stream_count(Peer* peer);

  Shared* const shared_;
  Poller* const poller_;
  Losses* const losses_;
  bool pump_again_ = false;
};

}  // namespace bagua::mesh
