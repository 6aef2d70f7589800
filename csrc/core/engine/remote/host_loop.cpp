// Work of a communicator that spans hosts.

#include <algorithm>
#include <utility>
#include <variant>

#include "base/clock.h"
#include "engine/remote/host_executor.h"

namespace bagua {

namespace {

constexpr int64_t kDepartureCheckNs = 250 * kNsPerMs;  // while a host is leaving and something is pending
// Elastic jobs go on without a host that says nothing for so many steps, and at least so long.
constexpr int64_t kSilentSteps = 8, kLeastSilenceNs = 5 * kNsPerS;
constexpr size_t kMostAccused = 128;  // of a whole network that breaks, each host tells so many

}  // namespace

void HostExecutor::serve() {
  progress_ns_ = now_ns();
  mesh_.need_all(comm_->topology().host + 1);  // those that this host dials: see accused()
  while (!state_->over() && !(inbox_.closing() && idle() && inbox_.empty() && dialler_.done())) {
    if (dialler_.refused()) return dialling_failed();
    const Status status = turn();
    if (status) continue;
    const bool lost = status.code() == Code::kUnavailable || status.code() == Code::kTimeout;
    lost ? state_->lose({status.message(), -1, lost_host(), false, accused()}) : state_->fail(status.message());
    return;
  }
}

void HostExecutor::dialling_failed() {
  if (inbox_.closing()) return;
  Loss loss = dialler_.loss();
  loss.accused = accused(loss.host);
  dialler_.may_pass() ? state_->lose(loss) : state_->fail(loss.text);
}

// One round: new operations, then the network, then one computation.
Status HostExecutor::turn() {
  take_inbox();
  follow_step();
  if (Status status = settle_ring(); !status) return status;
  if (Status status = exchange_.pump(); !status) return status;
  departures_.settle(progress_ns_);
  inbox_.answer([this](int64_t before_ns) { return describe_pending(before_ns); });
  tell_mesh_what_we_await();
  const int64_t deadline = exchange_.computing() ? now_ns() : next_deadline();
  const Status network = poll(deadline);
  if (!network) return network_failed(network);
  for (const Mesh::Completion& completion : completions_) {
    if (Status status = on_completion(completion); !status) return status;
  }
  exchange_.compute();
  return Status::ok();
}

void HostExecutor::take_inbox() {
  ExecutorInbox::Content content = inbox_.take();
  const bool any = !content.collectives.empty() || !content.between.empty();
  if (any && idle()) progress_ns_ = now_ns();
  for (Collective& operation : content.collectives) exchange_.add(std::move(operation));
  for (Communicator::Between& one : content.between) {
    if (const auto* target = std::get_if<Communicator::Target>(&one)) {
      p2p_.seek(*target);
    } else if (Status status = p2p_.add(std::get<SendOrRecv>(std::move(one))); !status) {
      state_->fail(status.message());
    }
  }
  departures_.tell_left(content.left);
}

// How long a host may be silent, once it is known how long a step takes. A ping leaves after the first second of a
// silence. Every host of the generation has made the world; other communicators are made when their ranks like.
void HostExecutor::follow_step() {
  const int64_t step_ns = state_->step_ns();
  if (step_ns == step_ns_) return;
  step_ns_ = step_ns;
  const int64_t silence_ns = std::max(kSilentSteps * step_ns, kLeastSilenceNs) - kNsPerS;
  mesh_.set_silence_timeout(silence_ns);
  if (comm_->id() == 0) mesh_.set_first_word_timeout(silence_ns);
}

Status HostExecutor::settle_ring() {
  if (!exchange_.ring_awaited() || !dialler_.done()) return Status::ok();
  survey_.advance(!exchange_.idle());
  return survey_.settled() ? exchange_.set_ring(survey_.order()) : Status::ok();
}

void HostExecutor::tell_mesh_what_we_await() {
  mesh_.set_waiting(!idle() || comm_->awaits_any());
  awaited_.assign(static_cast<size_t>(comm_->hosts()), false);
  exchange_.mark_awaited(&awaited_);
  p2p_.mark_awaited(&awaited_);
  mesh_.set_awaited(awaited_);
}

int64_t HostExecutor::next_deadline() const {
  const int64_t survey = survey_.deadline();
  if (idle() || !departures_.any_departed()) return survey;
  const int64_t check = now_ns() + kDepartureCheckNs;
  return survey < 0 ? check : std::min(check, survey);
}

int HostExecutor::lost_host() const {
  const int peer = mesh_.failed_peer();
  return peer < 0 ? -1 : comm_->job_hosts()[static_cast<size_t>(peer)];
}

std::vector<int> HostExecutor::accused(int host) const {
  std::vector<int> found;
  if (host >= 0) found.push_back(host);
  for (const int peer : mesh_.suspects(now_ns())) {
    const int other = comm_->job_hosts()[static_cast<size_t>(peer)];
    if (other != host && found.size() < kMostAccused) found.push_back(other);
  }
  return found;
}

// Bytes that changed on their way have cost a connection, as a broken one would: the next generation has new ones, with
// new keys. Nothing of them was used.
Status HostExecutor::network_failed(const Status& status) const {
  const std::string operation = exchange_.oldest();
  const Code code = status.code() == Code::kCorrupt ? Code::kUnavailable : status.code();
  return {code, (operation.empty() ? "" : operation + ": ") + status.message()};
}

Status HostExecutor::on_completion(const Mesh::Completion& completion) {
  progress_ns_ = now_ns();
  if (completion.event == Mesh::Event::kControl) {
    Control control;
    if (decode(completion.control, &control)) return on_control(completion.peer, control);
    return {Code::kCorrupt, comm_->host_text(completion.peer) + " sent a control message that is none of ours"};
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
  const ByMessage by_message{
      [&](const message::Describe& other) { return on_describe(peer, other); },
      [&](const message::Ready& other) { return p2p_.ready(peer, other); },
      [&](const message::Seek& other) { return p2p_.on_seek(peer, other); },
      [&](const message::Offer& other) { return p2p_.on_offer(peer, other); },
      [&](const message::Left& left) {
        departures_.on_left(left);
        return Status::ok();
      },
      [&](const message::Failed& failed) {
        departures_.on_end(peer);
        return Status(Code::kAborted, failed.why);
      },
      [&](const message::Suspended& suspended) {
        departures_.on_end(peer);
        if (suspended.next != 0) {
          state_->retire(suspended.why);
        } else {
          state_->lose({suspended.why, suspended.member, suspended.host, false, accused()});
        }
        return Status::ok();
      },
      [&](const message::Close& close) {
        departures_.on_close(peer, close.done, close.why);
        return Status::ok();
      },
      [&](const message::Closed&) {
        departures_.on_end(peer);
        return Status::ok();
      },
      [&](const auto& of_survey) { return survey_.hear(peer, of_survey); },
  };
  return std::visit(by_message, control);
}

Status HostExecutor::on_describe(int peer, const message::Describe& other) {
  const Status status = exchange_.describe(peer, other);
  begun_elsewhere_.store(exchange_.begun_elsewhere(), std::memory_order_release);
  const auto& local = comm_->local_ranks();
  const bool somebody_left =
      std::any_of(local.begin(), local.end(), [this](int rank) { return state_->phase(rank) == Phase::kLeft; });
  if (somebody_left) state_->job().page.ring_doorbell();  // the dispatcher knows whether that rank is needed
  return status;
}

std::string HostExecutor::describe_pending(int64_t before_ns) const {
  const int64_t now = now_ns();
  std::string text = exchange_.describe_pending(now, before_ns);
  if (!text.empty()) {
    const std::string waits = mesh_.describe_waits(now);
    text += (waits.empty() ? "" : " (" + waits + ")") + "\n";
  }
  return text + p2p_.describe_pending(now, before_ns);
}

}  // namespace bagua
