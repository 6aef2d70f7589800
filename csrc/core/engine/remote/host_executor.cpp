#include "engine/remote/host_executor.h"

#include <algorithm>
#include <utility>

#include "base/clock.h"

namespace bagua {

namespace {

constexpr int64_t kNever = INT64_MAX / 4;

MeshOptions mesh_options(GenerationState* state, const Communicator* comm) {
  const EngineOptions& options = state->job().options;
  MeshOptions mesh;
  mesh.generation = state->membership().generation;
  mesh.comm = comm->id();
  mesh.host = comm->topology().host;
  mesh.hosts = comm->hosts();
  mesh.streams = options.streams;
  mesh.name = [comm](int peer) { return comm->host_text(peer); };
  for (const int host : comm->job_hosts()) mesh.verdicts.push_back(state->stream_verdict(host));
  // Ranks of another host may make a communicator much later than ours do. If that host dies, the world's mesh tells.
  // Newcomers that are alone on their host wait as long as a step of the members takes: these dial, and tell of a link
  // that is broken. A moment more than the dialler, which knows better why a host can't be reached.
  mesh.connect_timeout_ns = comm->id() == 0 && !state->comes_first() ? options.connect_timeout_ns + kNsPerS : kNever;
  mesh.silence_timeout_ns = options.peer_timeout_ns;
  mesh.spare_operation = RingSurvey::kOperation;
  if (comm->id() == 0) mesh.first_word_timeout_ns = options.connect_timeout_ns + options.peer_timeout_ns;
  return mesh;
}

}  // namespace

HostExecutor::HostExecutor(GenerationState* state, Network* network, Communicator* comm)
    : state_(state),
      network_(network),
      comm_(comm),
      mesh_(mesh_options(state, comm)),
      exchange_(state, comm, &mesh_),
      p2p_(state, comm, &mesh_),
      survey_(state, network, comm, &mesh_),
      departures_(state, comm, &mesh_, &exchange_, &p2p_, &survey_),
      dialler_(state, network, comm, &mesh_) {
  if (!survey_.settled()) exchange_.await_ring();
}

void HostExecutor::start() {
  network_->enroll(comm_->id(), comm_->instance(), this);
  const Lock lock(join_mutex_);
  thread_ = std::thread([this] { run(); });
}

void HostExecutor::note_left(int rank) {
  if (inbox_.note_left(rank)) wake();
}

void HostExecutor::wake() {
  inbox_.notify();
  mesh_.wake();
}

int HostExecutor::peer_of(int host) const {
  const auto& hosts = comm_->job_hosts();
  const auto found = std::find(hosts.begin(), hosts.end(), host);
  return found == hosts.end() ? -1 : static_cast<int>(found - hosts.begin());
}

bool HostExecutor::attach(int host, int stream, Connection connection) {
  const int peer = peer_of(host);
  if (peer < 0) return false;
  mesh_.attach(peer, stream, std::move(connection));
  mesh_.wake();  // the survey waits for the last one
  return true;
}

bool HostExecutor::has_departed(int host) const {
  const int peer = peer_of(host);
  return peer >= 0 && departures_.has_departed(peer);
}

std::string HostExecutor::describe(int64_t before_ns) {
  return inbox_.ask(before_ns, [this] { wake(); });
}

void HostExecutor::begin_close() {
  inbox_.begin_close();
  wake();
}

void HostExecutor::close() {
  const Lock lock(join_mutex_);
  if (!thread_.joinable()) return;
  begin_close();
  thread_.join();
  network_->withdraw(comm_->id(), comm_->instance());
}

void HostExecutor::run() {
  const bool dialling = dialler_.begin(&inbox_);
  if (dialling) serve();
  survey_.give_up();
  if (dialling && !state_->over() && dialler_.done()) await_others();
  dialler_.end();
  if (state_->ended()) {
    leave();
  } else if (state_->suspended()) {
    report_loss();
  } else if (state_->over()) {
    report_failure();
  }
  abandon();
  // After a failure the connections have ended, after the cause was told.
  inbox_.await([this] { return inbox_.closing(); });
  over_.store(true, std::memory_order_release);
  state_->job().page.ring_doorbell();  // the dispatcher frees us
}

Status HostExecutor::poll(int64_t deadline_ns) {
  completions_.clear();
  Status status = mesh_.poll(deadline_ns, &completions_);
  const Mesh::Counters now = mesh_.counters();
  Counters& job = state_->job().counters();
  const auto add = [this, &now](std::atomic<uint64_t>* total, uint64_t Mesh::Counters::* count) {
    total->fetch_add(now.*count - counted_.*count, std::memory_order_relaxed);
  };
  add(&job.bytes_sent, &Mesh::Counters::bytes_sent);
  add(&job.bytes_received, &Mesh::Counters::bytes_received);
  add(&job.bytes_encrypted, &Mesh::Counters::bytes_encrypted);
  add(&job.frames_refused, &Mesh::Counters::frames_refused);
  add(&job.frames_dropped, &Mesh::Counters::frames_dropped);
  counted_ = now;
  return status;
}

void HostExecutor::abandon() {
  const Outcome outcome = state_->outcome();
  const ExecutorInbox::Content content = inbox_.close();
  exchange_.abandon();
  p2p_.abandon();
  for (const Collective& operation : content.collectives) {
    for (const Operation& part : operation.parts) RankTable::complete(part, operation.started_ns, outcome);
  }
  for (const Communicator::Between& one : content.between) {
    const auto* half = std::get_if<SendOrRecv>(&one);
    if (half != nullptr) RankTable::complete(half->operation, half->operation.submitted_ns, outcome);
  }
  // Nobody uses the communicator again: it was destroyed. One that has failed or ended may have a successor.
  if (!state_->over()) state_->job().residuals().drop(comm_->id(), comm_->instance());
}

}  // namespace bagua
