#include "engine/remote/host_loop.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "base/clock.h"
#include "engine/local/host_names.h"

namespace bagua {

namespace {

constexpr int64_t kDepartureCheckNs = 250 * kNsPerMs;  // while a host is leaving and something is pending
// Elastic jobs go on without a host that says nothing for so many steps, and at least so long.
constexpr int64_t kSilentSteps = 8, kLeastSilenceNs = 5 * kNsPerS;

}  // namespace

void HostLoop::serve() {
  progress_ns_ = now_ns();
  while (!state_->over() && !(parts_.inbox->closing() && idle() && parts_.inbox->empty())) {
    const Status status = turn();
    if (status) continue;
    const bool lost = status.code() == Code::kUnavailable || status.code() == Code::kTimeout;
    lost ? state_->lose({status.message(), -1, lost_host()}) : state_->fail(status.message());
    return;
  }
}

// One round: new operations, then the network, then one computation.
Status HostLoop::turn() {
  take_inbox();
  follow_step();
  if (Status status = settle_ring(); !status) return status;
  if (Status status = parts_.exchange->pump(); !status) return status;
  parts_.departures->settle(progress_ns_);
  if (parts_.inquiry->pending()) parts_.inquiry->answer([this](int64_t before_ns) { return describe(before_ns); });
  completions_.clear();
  tell_mesh_what_we_await();
  const int64_t deadline = parts_.exchange->computing() ? now_ns() : next_deadline();
  const Status network = parts_.mesh->poll(deadline, &completions_);
  parts_.traffic->update();
  if (!network) return network_failed(network);
  for (const Mesh::Completion& completion : completions_) {
    if (Status status = on_completion(completion); !status) return status;
  }
  parts_.exchange->compute();
  return Status::ok();
}

void HostLoop::take_inbox() {
  ExecutorInbox::Content content = parts_.inbox->take();
  const bool any = !content.collectives.empty() || !content.between.empty();
  if (any && idle()) progress_ns_ = now_ns();
  for (Collective& operation : content.collectives) parts_.exchange->add(std::move(operation));
  for (Communicator::Between& one : content.between) {
    if (const auto* target = std::get_if<Communicator::Target>(&one)) {
      parts_.p2p->seek(*target);
    } else if (Status status = parts_.p2p->add(std::get<SendOrRecv>(std::move(one))); !status) {
      state_->fail(status.message());
    }
  }
  parts_.departures->tell_left(content.left);
}

// How long a host may be silent, once it is known how long a step takes. A ping leaves after the first second of a
// silence. Every host of the generation has made the world; other communicators are made when their ranks like.
void HostLoop::follow_step() {
  const int64_t step_ns = state_->step_ns();
  if (step_ns == step_ns_) return;
  step_ns_ = step_ns;
  const int64_t silence_ns = std::max(kSilentSteps * step_ns, kLeastSilenceNs) - kNsPerS;
  parts_.mesh->set_silence_timeout(silence_ns);
  if (comm_->id() == 0) parts_.mesh->set_first_word_timeout(silence_ns);
}

Status HostLoop::settle_ring() {
  if (!parts_.exchange->ring_awaited()) return Status::ok();
  parts_.survey->advance(!parts_.exchange->idle());
  return parts_.survey->settled() ? parts_.exchange->set_ring(parts_.survey->order()) : Status::ok();
}

void HostLoop::tell_mesh_what_we_await() {
  parts_.mesh->set_waiting(!idle() || comm_->awaits_any());
  awaited_.assign(static_cast<size_t>(comm_->hosts()), false);
  parts_.exchange->mark_awaited(&awaited_);
  parts_.p2p->mark_awaited(&awaited_);
  parts_.mesh->set_awaited(awaited_);
}

int64_t HostLoop::next_deadline() const {
  const int64_t survey = parts_.survey->deadline();
  if (idle() || !parts_.departures->any_departed()) return survey;
  const int64_t check = now_ns() + kDepartureCheckNs;
  return survey < 0 ? check : std::min(check, survey);
}

int HostLoop::lost_host() const {
  const int peer = parts_.mesh->failed_peer();
  return peer < 0 ? -1 : comm_->job_hosts()[static_cast<size_t>(peer)];
}

// Bytes that changed on their way have cost a connection, as a broken one would: the next generation has new ones, with
// new keys. Nothing of them was used.
Status HostLoop::network_failed(const Status& status) const {
  const std::string operation = parts_.exchange->oldest();
  const Code code = status.code() == Code::kCorrupt ? Code::kUnavailable : status.code();
  return {code, (operation.empty() ? "" : operation + ": ") + status.message()};
}

Status HostLoop::on_completion(const Mesh::Completion& completion) {
  progress_ns_ = now_ns();
  if (completion.event == Mesh::Event::kControl) {
    Control control;
    if (decode(completion.control, &control)) return on_control(completion.peer, control);
    return {Code::kCorrupt,
            host_text(state_->membership(), *comm_, completion.peer) + " sent a control message that is none of ours"};
  }
  if (completion.cookie == RingSurvey::kSent || completion.cookie == RingSurvey::kReceived) {
    parts_.survey->complete(completion.cookie);
  } else if (completion.cookie & PointToPoint::kCookie) {
    parts_.p2p->complete(completion.cookie);
  } else {
    parts_.exchange->complete(completion.cookie);
  }
  return Status::ok();
}

Status HostLoop::on_control(int peer, const Control& control) {
  Departures* const departures = parts_.departures;
  const ByMessage by_message{
      [&](const message::Describe& other) { return on_describe(peer, other); },
      [&](const message::Ready& other) { return parts_.p2p->ready(peer, other); },
      [&](const message::Seek& other) { return parts_.p2p->on_seek(peer, other); },
      [&](const message::Offer& other) { return parts_.p2p->on_offer(peer, other); },
      [&](const message::Left& left) {
        departures->on_left(left);
        return Status::ok();
      },
      [&](const message::Failed& failed) {
        departures->on_end(peer);
        return Status(Code::kAborted, failed.why);
      },
      [&](const message::Suspended& suspended) {
        departures->on_end(peer);
        if (suspended.next != 0) {
          state_->retire(suspended.why);
        } else {
          state_->lose({suspended.why, suspended.member, suspended.host});
        }
        return Status::ok();
      },
      [&](const message::Close& close) {
        departures->on_close(peer, close.done, close.why);
        return Status::ok();
      },
      [&](const message::Closed&) {
        departures->on_end(peer);
        return Status::ok();
      },
      [&](const auto& of_survey) { return parts_.survey->hear(peer, of_survey); },
  };
  return std::visit(by_message, control);
}

Status HostLoop::on_describe(int peer, const message::Describe& other) {
  const Status status = parts_.exchange->describe(peer, other);
  begun_elsewhere_.store(parts_.exchange->begun_elsewhere(), std::memory_order_release);
  const auto& local = comm_->local_ranks();
  const bool somebody_left =
      std::any_of(local.begin(), local.end(), [this](int rank) { return state_->phase(rank) == Phase::kLeft; });
  if (somebody_left) state_->job().page().ring_doorbell();  // the dispatcher knows whether that rank is needed
  return status;
}

std::string HostLoop::describe(int64_t before_ns) const {
  const int64_t now = now_ns();
  std::string text = parts_.exchange->describe_pending(now, before_ns);
  if (!text.empty()) {
    const std::string waits = parts_.mesh->describe_waits(now);
    text += (waits.empty() ? "" : " (" + waits + ")") + "\n";
  }
  return text + parts_.p2p->describe_pending(now, before_ns);
}

}  // namespace bagua
