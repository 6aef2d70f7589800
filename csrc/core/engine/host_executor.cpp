#include "engine/host_executor.h"

#include <algorithm>

#include "base/clock.h"
#include "base/text.h"

namespace bagua {

namespace {

constexpr int64_t kDialSliceNs = 2 * kNsPerS;          // how often a dialler looks whether the engine has failed
constexpr int64_t kDepartureCheckNs = 250 * kNsPerMs;  // while a host is leaving and something is pending
constexpr int64_t kNever = INT64_MAX / 4;

MeshOptions mesh_options(EngineState& state, const Communicator& comm) {
  const EngineOptions& options = state.options();
  MeshOptions mesh;
  mesh.job_id = options.credentials.job_id;
  mesh.generation = options.generation;
  mesh.comm = comm.id();
  mesh.host = comm.topology().host;
  mesh.hosts = comm.hosts();
  mesh.streams = options.streams;
  for (const int host : comm.job_hosts()) mesh.verdicts.push_back(state.stream_verdict(host));
  mesh.zero_copy = options.zero_copy ? ZeroCopyMode::kAuto : ZeroCopyMode::kOff;
  // Ranks of another host may make a communicator much later than ours do. If that host dies, the world's mesh tells.
  mesh.connect_timeout_ns = comm.id() == 0 ? options.connect_timeout_ns : kNever;
  mesh.silence_timeout_ns = options.peer_timeout_ns;
  mesh.spare_operation = RingSurvey::kOperation;
  if (comm.id() == 0) mesh.first_word_timeout_ns = options.connect_timeout_ns + options.peer_timeout_ns;
  return mesh;
}

}  // namespace

HostExecutor::HostExecutor(EngineState* state, RankTable* ranks, Network* network, const Communicator* comm)
    : state_(state),
      ranks_(ranks),
      network_(network),
      comm_(comm),
      mesh_(mesh_options(*state, *comm)),
      has_departed_(new std::atomic<bool>[static_cast<size_t>(comm->hosts())]()),
      exchange_(state, ranks, comm, &mesh_),
      p2p_(state, ranks, comm, &mesh_),
      survey_(state, network, comm, &mesh_),
      departures_(static_cast<size_t>(comm->hosts())),
      heard_end_(static_cast<size_t>(comm->hosts()), false) {
  if (!survey_.settled()) exchange_.await_ring();
}

void HostExecutor::start() {
  network_->enroll(comm_->id(), comm_->instance(), this);
  thread_ = std::thread([this] { run(); });
}

bool HostExecutor::submit(Collective* operation) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (ended_) return false;
    if (first_submit_ns_ < 0) first_submit_ns_ = now_ns();
    collectives_.push_back(std::move(*operation));
  }
  wake();
  return true;
}

bool HostExecutor::submit(SendOrRecv* half) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (ended_) return false;
    if (first_submit_ns_ < 0) first_submit_ns_ = now_ns();
    halves_.push_back(std::move(*half));
  }
  wake();
  return true;
}

void HostExecutor::wake() {
  {
    std::lock_guard<std::mutex> lock(mutex_);  // so that nobody is between its test and its sleep
  }
  changed_.notify_all();
  mesh_.wake();
}

bool HostExecutor::attach(int host, int stream, Connection connection) {
  const auto& hosts = comm_->job_hosts();
  const auto found = std::find(hosts.begin(), hosts.end(), host);
  if (found == hosts.end()) return false;
  mesh_.attach(static_cast<int>(found - hosts.begin()), stream, std::move(connection));
  mesh_.wake();  // the survey waits for the last one
  return true;
}

void HostExecutor::begin_close() {
  closing_.store(true, std::memory_order_release);
  wake();
}

void HostExecutor::close() {
  std::lock_guard<std::mutex> lock(join_mutex_);
  if (!thread_.joinable()) return;
  begin_close();
  thread_.join();
  network_->withdraw(comm_->id(), comm_->instance());
}

std::string HostExecutor::describe(int64_t before_ns) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (ended_) return "";
  describe_wanted_ = true;
  describe_before_ns_ = before_ns;
  mesh_.wake();
  changed_.notify_all();
  changed_.wait_for(lock, std::chrono::milliseconds(200), [this] { return !describe_wanted_; });
  return describe_wanted_ ? "" : description_;
}

void HostExecutor::run() {
  const bool connected = await_peers() && dial_all();
  if (connected) serve();
  survey_.give_up();
  if (connected && !state_->failed()) await_others();
  if (state_->ended()) {
    leave();
  } else if (state_->failed()) {
    report_failure();
  }
  finish();
  stay_until_closed();
  over_.store(true, std::memory_order_release);
  state_->ring_doorbell();  // the dispatcher frees us
}

bool HostExecutor::await_peers() {
  std::unique_lock<std::mutex> lock(mutex_);
  const int64_t timeout = state_->options().connect_timeout_ns;
  for (;;) {
    if (state_->failed()) return false;
    if (network_->peers_known()) return true;
    if (first_submit_ns_ < 0) {
      changed_.wait(lock);
      continue;
    }
    const int64_t left = first_submit_ns_ + timeout - now_ns();
    if (left > 0) {
      changed_.wait_for(lock, std::chrono::nanoseconds(left));
      continue;
    }
    lock.unlock();
    state_->fail("the addresses of the other hosts did not come within " + duration_text(timeout) +
                 ": is the coordinator running, and are all hosts of the job up?");
    return false;
  }
}

bool HostExecutor::dial_all() {
  const int64_t deadline = now_ns() + state_->options().connect_timeout_ns;
  for (int peer = comm_->topology().host + 1; peer < comm_->hosts(); ++peer) {
    // The control lane, number `streams`, comes first: it is the one that tells of the peer's death.
    for (int stream = state_->options().streams; stream >= 0; --stream) {
      const Status status = dial(peer, stream, deadline);
      if (state_->failed()) return false;
      if (status) continue;
      if (closing()) return false;  // nobody needs it
      state_->fail("no connection to " + host_text(peer) + " at " +
                   network_->peer_address(comm_->job_hosts()[static_cast<size_t>(peer)]) + ": " + status.message());
      return false;
    }
  }
  return true;
}

Status HostExecutor::dial(int peer, int stream, int64_t deadline_ns) {
  const EngineOptions& options = state_->options();
  const int to = comm_->job_hosts()[static_cast<size_t>(peer)];
  const std::string address = network_->peer_address(to);
  PeerInfo me;
  me.generation = options.generation;
  me.comm = comm_->id();
  me.instance = comm_->instance();
  me.from = static_cast<uint32_t>(options.host_index);
  me.to = static_cast<uint32_t>(to);
  me.stream = static_cast<uint32_t>(stream);
  Status status;
  do {
    Connection connection;
    status = connect_tcp(address, std::min(deadline_ns, now_ns() + kDialSliceNs), &connection.socket);
    if (!status) continue;
    const int64_t slice = std::min(deadline_ns, now_ns() + kDialSliceNs);
    status = dial_handshake(connection.socket.fd(), options.credentials, me, slice, &connection.seals);
    if (status) {
      mesh_.attach(peer, stream, std::move(connection));
      return status;
    }
    // A host that is not there yet, or has died, may come back. What the two have told each other stays.
    if (status.code() != Code::kTimeout && status.code() != Code::kUnavailable) return status;
  } while (now_ns() < deadline_ns && !state_->failed());
  return status;
}

void HostExecutor::serve() {
  progress_ns_ = now_ns();
  while (!state_->failed() && !(closing() && idle())) {
    if (!turn()) return;
  }
}

bool HostExecutor::idle() {
  if (!exchange_.idle() || !p2p_.idle()) return false;
  std::lock_guard<std::mutex> lock(mutex_);
  return collectives_.empty() && halves_.empty();
}

bool HostExecutor::has_departed(int host) const {
  const auto& hosts = comm_->job_hosts();
  const auto found = std::find(hosts.begin(), hosts.end(), host);
  return found != hosts.end() && has_departed_[static_cast<size_t>(found - hosts.begin())].load();
}

// One round: new operations, then the network, then one computation. False: this executor's work has ended.
bool HostExecutor::turn() {
  take_inbox();
  say_who_left();
  Status status = settle_ring();
  if (status) status = exchange_.pump();
  if (!status) {
    state_->fail(status.message());
    return false;
  }
  watch_departures();
  answer_description();
  completions_.clear();
  tell_mesh_what_we_await();
  const Status network = mesh_.poll(exchange_.computing() ? now_ns() : next_deadline(), &completions_);
  count_traffic();
  if (!network) return network_failed(network);
  for (const Mesh::Completion& completion : completions_) {
    status = on_completion(completion);
    if (status) continue;
    state_->fail(status.message());
    return false;
  }
  exchange_.compute();
  return true;
}

Status HostExecutor::settle_ring() {
  if (!exchange_.ring_awaited()) return Status::ok();
  survey_.advance(!exchange_.idle());
  return survey_.settled() ? exchange_.set_ring(survey_.order()) : Status::ok();
}

void HostExecutor::tell_mesh_what_we_await() {
  mesh_.set_waiting(!exchange_.idle() || !p2p_.idle());
  awaited_.assign(static_cast<size_t>(comm_->hosts()), false);
  exchange_.mark_awaited(&awaited_);
  p2p_.mark_awaited(&awaited_);
  mesh_.set_awaited(awaited_);
}

// Returns false.
bool HostExecutor::network_failed(const Status& status) {
  const std::string operation = exchange_.oldest();
  state_->fail((operation.empty() ? "" : operation + ": ") + name_hosts(status.message()));
  return false;
}

void HostExecutor::take_inbox() {
  std::deque<Collective> collectives;
  std::deque<SendOrRecv> halves;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    collectives.swap(collectives_);
    halves.swap(halves_);
    left_seen_ = left_;  // with the halves: those of a rank that left are all here
  }
  if (collectives.empty() && halves.empty()) return;
  if (exchange_.idle() && p2p_.idle()) progress_ns_ = now_ns();
  for (Collective& operation : collectives) exchange_.add(std::move(operation));
  for (SendOrRecv& half : halves) {
    if (Status status = p2p_.add(std::move(half)); !status) state_->fail(status.message());
  }
}

void HostExecutor::note_left(int rank) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (std::find(left_.begin(), left_.end(), rank) != left_.end()) return;
    left_.push_back(rank);
  }
  wake();
}

void HostExecutor::say_who_left() {
  if (left_seen_.size() == told_left_.size()) return;
  for (const int rank : left_seen_) {
    if (p2p_.pending(rank) || std::find(told_left_.begin(), told_left_.end(), rank) != told_left_.end()) continue;
    say_left(rank, "has left the job in good order");
  }
}

void HostExecutor::say_left(int rank, const std::string& how) {
  told_left_.push_back(rank);
  Control control;
  control.type = Control::Type::kLeft;
  control.rank = rank;
  control.text = how;
  for (int peer = 0; peer < comm_->hosts(); ++peer) {
    if (peer == comm_->topology().host) continue;
    control.sequence = p2p_.sends_begun(comm_->index_of(rank), peer);
    mesh_.send_control(peer, encode(control));
  }
}

Status HostExecutor::on_completion(const Mesh::Completion& completion) {
  progress_ns_ = now_ns();
  if (completion.event == Mesh::Event::kControl) {
    Control control;
    if (!decode(completion.control, &control)) {
      return {Code::kCorrupt, host_text(completion.peer) + " sent a control message that is none of ours"};
    }
    return on_control(completion.peer, control);
  }
  if (completion.cookie == RingSurvey::kSent || completion.cookie == RingSurvey::kReceived) {
    survey_.complete(completion.cookie);
  } else if (completion.cookie & PointToPoint::kCookie) {
    p2p_.complete(completion.cookie);
  } else {
    exchange_.complete(completion.cookie);
  }
  return Status::ok();
}

Status HostExecutor::on_control(int peer, const Control& control) {
  switch (control.type) {
    case Control::Type::kDescribe: {
      Status status = exchange_.describe(peer, control);
      begun_elsewhere_.store(exchange_.begun_elsewhere(), std::memory_order_release);
      const auto& local = comm_->local_ranks();
      const bool somebody_left =
          std::any_of(local.begin(), local.end(), [this](int rank) { return ranks_->phase(rank) == Phase::kLeft; });
      if (somebody_left) state_->ring_doorbell();  // the dispatcher knows whether that rank is needed
      return status;
    }
    case Control::Type::kReady:
      return p2p_.ready(peer, control);
    case Control::Type::kLeft:
      if (const int index = comm_->index_of(control.rank); index >= 0) p2p_.left(index, control.sequence, control.text);
      return Status::ok();
    case Control::Type::kError:
      heard_end_[static_cast<size_t>(peer)] = true;
      return {Code::kAborted, control.text};
    case Control::Type::kClose:
      depart(peer, control);
      return Status::ok();
    case Control::Type::kClosed:
      heard_end_[static_cast<size_t>(peer)] = true;
      return Status::ok();
    default:
      return survey_.on_control(peer, control);
  }
}

int64_t HostExecutor::next_deadline() const {
  const int64_t survey = survey_.deadline();
  if (exchange_.idle() && p2p_.idle()) return survey;
  for (const Departure& departure : departures_) {
    if (departure.since_ns < 0) continue;
    const int64_t check = now_ns() + kDepartureCheckNs;
    return survey < 0 ? check : std::min(check, survey);
  }
  return survey;
}

void HostExecutor::answer_description() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!describe_wanted_) return;
  const int64_t now = now_ns();
  std::string text = exchange_.describe_pending(now, describe_before_ns_);
  if (!text.empty()) {
    const std::string waits = mesh_.describe_waits(now);
    text = name_hosts(text + (waits.empty() ? "" : " (" + waits + ")")) + "\n";
  }
  description_ = text + p2p_.describe_pending(now, describe_before_ns_);
  describe_wanted_ = false;
  lock.unlock();
  changed_.notify_all();
}

void HostExecutor::tell_all(const Control& control) {
  const std::string bytes = encode(control);
  for (int peer = 0; peer < comm_->hosts(); ++peer) {
    if (peer != comm_->topology().host) mesh_.send_control(peer, bytes);
  }
}

void HostExecutor::count_traffic() {
  const Mesh::Counters now = mesh_.counters();
  Counters& counters = state_->counters();
  counters.bytes_sent.fetch_add(now.bytes_sent - counted_.bytes_sent, std::memory_order_relaxed);
  counters.bytes_received.fetch_add(now.bytes_received - counted_.bytes_received, std::memory_order_relaxed);
  counters.bytes_encrypted.fetch_add(now.bytes_encrypted - counted_.bytes_encrypted, std::memory_order_relaxed);
  counters.frames_refused.fetch_add(now.frames_refused - counted_.frames_refused, std::memory_order_relaxed);
  counters.frames_dropped.fetch_add(now.frames_dropped - counted_.frames_dropped, std::memory_order_relaxed);
  counters.zero_copy_bytes.fetch_add(now.zero_copy_bytes - counted_.zero_copy_bytes, std::memory_order_relaxed);
  counters.zero_copy_off.fetch_add(now.zero_copy_off - counted_.zero_copy_off, std::memory_order_relaxed);
  counted_ = now;
}

std::string HostExecutor::host_text(int peer) const {
  const int host = comm_->job_hosts()[static_cast<size_t>(peer)];
  const auto& ranks = state_->options().hosts[static_cast<size_t>(host)];
  std::string text = "host " + std::to_string(host) + (ranks.size() == 1 ? " (rank " : " (ranks ");
  for (size_t i = 0; i < ranks.size(); ++i) text += (i > 0 ? ", " : "") + std::to_string(ranks[i]);
  return text + ")";
}

// The mesh numbers the hosts of the communicator; people know those of the job, and ranks.
std::string HostExecutor::name_hosts(const std::string& text) const {
  const std::string word = "host ";
  std::string named;
  size_t at = 0;
  for (size_t found = text.find(word); found != std::string::npos; found = text.find(word, at)) {
    size_t end = found + word.size();
    int peer = 0;
    while (end < text.size() && text[end] >= '0' && text[end] <= '9' && peer < comm_->hosts()) {
      peer = peer * 10 + (text[end++] - '0');
    }
    const bool number = end > found + word.size() && peer < comm_->hosts();
    named += text.substr(at, found - at) + (number ? host_text(peer) : text.substr(found, end - found));
    at = end;
  }
  return named + text.substr(at);
}

}  // namespace bagua
