#include "engine/remote/host_executor.h"

#include <algorithm>
#include <utility>

#include "engine/local/host_names.h"

namespace bagua {

namespace {

constexpr int64_t kNever = INT64_MAX / 4;

MeshOptions mesh_options(GenerationState* state, const Communicator* comm) {
  const EngineOptions& options = state->job().options();
  MeshOptions mesh;
  mesh.generation = state->membership().generation;
  mesh.comm = comm->id();
  mesh.host = comm->topology().host;
  mesh.hosts = comm->hosts();
  mesh.streams = options.streams;
  mesh.name = [state, comm](int peer) { return host_text(state->membership(), *comm, peer); };
  for (const int host : comm->job_hosts()) mesh.verdicts.push_back(state->stream_verdict(host));
  // Ranks of another host may make a communicator much later than ours do. If that host dies, the world's mesh tells.
  mesh.connect_timeout_ns = comm->id() == 0 ? options.connect_timeout_ns : kNever;
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
      traffic_(&mesh_, &state->job().counters()),
      departures_(state, comm, &mesh_, &exchange_, &p2p_, &survey_),
      dialler_(state, network, comm, &mesh_),
      loop_(state, comm, {&mesh_, &inbox_, &inquiry_, &exchange_, &p2p_, &survey_, &departures_, &traffic_}),
      farewell_(state, network, comm, &mesh_, &departures_, &traffic_) {
  if (!survey_.settled()) exchange_.await_ring();
}

void HostExecutor::start() {
  network_->enroll(comm_->id(), comm_->instance(), this);
  const Lock lock(join_mutex_);
  thread_ = std::thread([this] { run(); });
}

bool HostExecutor::submit(Collective* operation) {
  if (!inbox_.put(operation)) return false;
  wake();
  return true;
}

bool HostExecutor::submit(Communicator::Between* one) {
  if (!inbox_.put(one)) return false;
  wake();
  return true;
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
  return inquiry_.ask(before_ns, [this] { wake(); });
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
  const bool connected = dialler_.connect(&inbox_);
  if (connected) loop_.serve();
  survey_.give_up();
  if (connected && !state_->over()) farewell_.await_others();
  if (state_->ended()) {
    farewell_.leave();
  } else if (state_->suspended()) {
    farewell_.report_loss();
  } else if (state_->over()) {
    farewell_.report_failure();
  }
  abandon();
  // After a failure the connections have ended, after the cause was told.
  inbox_.await([this] { return inbox_.closing(); });
  over_.store(true, std::memory_order_release);
  state_->job().page().ring_doorbell();  // the dispatcher frees us
}

void HostExecutor::abandon() {
  const Outcome outcome = state_->outcome();
  const ExecutorInbox::Content content = inbox_.close();
  inquiry_.close();
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
