#include "engine/remote/ring_survey.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "base/clock.h"
#include "base/text.h"

namespace bagua {

namespace {

using collective::plain_order;

std::string order_text(const std::vector<int>& order) {
  std::string text;
  for (const int host : order) text += (text.empty() ? "" : " ") + std::to_string(host);
  return text;
}

std::string rate_text(double bytes_per_s) {
  const double bits = bytes_per_s * 8;
  char text[64];
  if (bits >= 1e9) {
    snprintf(text, sizeof text, "%.1f Gbit/s", bits / 1e9);
  } else {
    snprintf(text, sizeof text, "%.2g Mbit/s", bits / 1e6);
  }
  return text;
}

// Pairs of round `round` of a round-robin tournament (the circle method): every pair meets once in all rounds.
int rounds_of(int hosts) {
  return hosts % 2 == 0 ? hosts - 1 : hosts;
}

std::vector<std::pair<int, int>> pairs_of(int hosts, int round) {
  const int circle = rounds_of(hosts);  // the last of an even number of hosts stands in the middle
  std::vector<std::pair<int, int>> pairs;
  if (hosts % 2 == 0) pairs.emplace_back(round, hosts - 1);
  for (int i = 1; i <= (circle - 1) / 2; ++i) {
    pairs.emplace_back((round + i) % circle, (round - i + circle) % circle);
  }
  return pairs;
}

Status senseless(int peer, const char* what) {
  return {Code::kCorrupt, "host " + std::to_string(peer) + " sent " + what + " that makes no sense"};
}

}  // namespace

RingSurvey::RingSurvey(GenerationState* state, Network* network, const Communicator* comm, Mesh* mesh)
    : state_(state), network_(network), comm_(comm), mesh_(mesh) {
  const int hosts = comm->hosts();
  order_ = plain_order(hosts);
  settled_ = hosts < kRingHosts;
  if (!world() || !deciding()) return;
  for (int host = 1; host < hosts; ++host) unconnected_.insert(host);
  rates_.assign(static_cast<size_t>(hosts), std::vector<double>(static_cast<size_t>(hosts), 0));
}

void RingSurvey::advance(bool pending) {
  if (settled_) return;
  if (!world()) {
    if (deciding()) from_world(pending);
    return;
  }
  if (deciding() && !state_->job().options.measure_ring) return tell(order_, "");
  if (deciding() && !state_->kept_ring().empty()) {
    return tell(state_->kept_ring(), "ring order " + order_text(state_->kept_ring()) + ", as before");
  }
  if (pending && !said_connected_) mesh_->need_all();
  if (!said_connected_ && mesh_->connected()) {
    said_connected_ = true;
    if (!deciding()) mesh_->send_control(0, encode(message::Connected{}));
  }
  if (!deciding() || !said_connected_ || !unconnected_.empty()) return;
  if (deadline_ns_ < 0) {
    deadline_ns_ = now_ns() + kLimitNs;
    start_round();
  } else if (now_ns() >= deadline_ns_) {
    settle_plain("the measurement of their bandwidths took longer than " + duration_text(kLimitNs));
  }
}

// The world's order without those that are no members. If it does not come, theirs stays.
void RingSurvey::from_world(bool pending) {
  const std::vector<int> world = state_->ring();
  if (world.empty()) {
    if (pending && deadline_ns_ < 0) deadline_ns_ = now_ns() + state_->job().options.connect_timeout_ns;
    if (deadline_ns_ >= 0 && now_ns() >= deadline_ns_) tell(order_, "");
    return;
  }
  const std::vector<int>& hosts = comm_->job_hosts();
  std::vector<int> order;
  for (const int host : world) {
    const auto found = std::find(hosts.begin(), hosts.end(), host);
    if (found != hosts.end()) order.push_back(static_cast<int>(found - hosts.begin()));
  }
  tell(std::move(order), "");
}

// ---- host 0 of the world

void RingSurvey::start_round() {
  for (const auto& [a, b] : pairs_of(comm_->hosts(), round_)) {
    missing_.emplace(a, b);
    missing_.emplace(b, a);
  }
  for (const auto& [from, to] : missing_) {
    if (from == 0) {
      begin(to);
    } else {
      mesh_->send_control(from, encode(message::Measure{static_cast<uint32_t>(to)}));
    }
  }
}

void RingSurvey::note_rate(int from, int to, double rate) {
  if (settled_ || missing_.erase({from, to}) == 0) return;
  rates_[static_cast<size_t>(from)][static_cast<size_t>(to)] = rate;
  if (!missing_.empty()) return;
  if (++round_ < rounds_of(comm_->hosts())) return start_round();
  collective::RingOrder best = collective::best_ring(rates_);
  const std::string text = "ring order " + order_text(best.order) + ": slowest link " + rate_text(best.slowest);
  tell(std::move(best.order), text);
}

void RingSurvey::settle_plain(const std::string& why) {
  const std::vector<int> order = plain_order(comm_->hosts());
  tell(order, "ring order " + order_text(order) + ": " + why);
}

void RingSurvey::tell(std::vector<int> order, const std::string& text) {
  const std::string bytes = encode(message::RingOrder{order, text});
  for (int peer = 1; peer < comm_->hosts(); ++peer) mesh_->send_control(peer, bytes);
  settle(std::move(order), text);
}

void RingSurvey::settle(std::vector<int> order, const std::string& text) {
  settled_ = true;
  order_ = std::move(order);
  if (in_flight_ == 0) free_buffers();
  if (!world()) return;
  if (!text.empty()) state_->job().events.tell("ring", -1, text);
  state_->set_ring(order_);
  network_->wake_targets();
}

// ---- measuring

void RingSurvey::begin(int target) {
  target_ = target;
  bytes_ = kFirstBytes;
  repeats_ = 0;
  best_ = 0;
  last_ns_ = 0;
  out_.resize(kFrameBytes);
  send_message();
}

void RingSurvey::send_message() {
  ++number_;
  sent_ns_ = now_ns();
  mesh_->send_control(target_, encode(message::Probe{static_cast<uint32_t>(bytes_), number_}));
  for (size_t at = 0; at < bytes_; at += kFrameBytes) {
    ++in_flight_;
    mesh_->send(target_, kOperation, number_ << 16 | at / kFrameBytes, out_.data(), std::min(kFrameBytes, bytes_ - at),
                kSent);
  }
}

// The message under way has arrived: a longer one, the same again, or that was it. One that took long may have met with
// a processor that was busy elsewhere.
void RingSurvey::arrived(int64_t now) {
  const int64_t took = std::max<int64_t>(1, now - sent_ns_);
  best_ = std::max(best_, static_cast<double>(bytes_) * 1e9 / static_cast<double>(took));
  if (settled_) {
    target_ = -1;
  } else if (took < kEnoughNs && bytes_ < kMostBytes) {
    bytes_ = std::min(4 * bytes_, kMostBytes);
    repeats_ = 0;
    best_ = 0;
    last_ns_ = 0;
    send_message();
  } else if (last_ns_ += took; ++repeats_ < kRepeats || (last_ns_ < kEnoughNs && repeats_ < kMostRepeats)) {
    send_message();
  } else {
    const int target = std::exchange(target_, -1);
    if (deciding()) return note_rate(0, target, best_);
    mesh_->send_control(0, encode(message::Measured{static_cast<uint32_t>(target), static_cast<uint64_t>(best_)}));
  }
}

// ---- messages

Status RingSurvey::hear(int peer, const message::Connected&) {
  unconnected_.erase(peer);
  return Status::ok();
}

Status RingSurvey::hear(int peer, const message::Measure& measure) {
  const bool other =
      measure.host < static_cast<uint32_t>(comm_->hosts()) && static_cast<int>(measure.host) != comm_->topology().host;
  if (peer != 0 || !world() || !other || target_ >= 0) return senseless(peer, "an order to measure");
  if (!settled_) begin(static_cast<int>(measure.host));
  return Status::ok();
}

Status RingSurvey::hear(int peer, const message::Probed& probed) {
  if (peer == target_ && probed.number == number_) arrived(now_ns());
  return Status::ok();
}

Status RingSurvey::hear(int peer, const message::Measured& measured) {
  if (!deciding() || measured.host >= static_cast<uint32_t>(comm_->hosts())) return senseless(peer, "a bandwidth");
  note_rate(peer, static_cast<int>(measured.host), static_cast<double>(measured.bytes_per_s));
  return Status::ok();
}

// The frames of a message that may be there already (then they wait in their streams).
Status RingSurvey::hear(int peer, const message::Probe& probe) {
  const size_t bytes = probe.bytes;
  if (bytes == 0 || bytes > kMostBytes || source_ >= 0) {
    return {Code::kCorrupt, "host " + std::to_string(peer) + " sent a measurement of " + std::to_string(bytes) +
                                " bytes" + (source_ >= 0 ? " while another was under way" : "")};
  }
  source_ = peer;
  answer_ = probe.number;
  in_.resize(kMostBytes);
  for (size_t at = 0; at < bytes; at += kFrameBytes) {
    ++in_flight_;
    ++frames_missing_;
    mesh_->recv(peer, kOperation, answer_ << 16 | at / kFrameBytes, in_.data() + at, std::min(kFrameBytes, bytes - at),
                kReceived);
  }
  return Status::ok();
}

void RingSurvey::complete(uint64_t cookie) {
  --in_flight_;
  if (cookie == kReceived && --frames_missing_ == 0) {
    const int peer = std::exchange(source_, -1);
    mesh_->send_control(peer, encode(message::Probed{answer_}));
  }
  if (settled_ && in_flight_ == 0) free_buffers();
}

Status RingSurvey::hear(int peer, const message::RingOrder& ring) {
  if (peer != 0 || settled_) return senseless(peer, "the order of a ring");
  std::vector<int> sorted = ring.order;
  std::sort(sorted.begin(), sorted.end());
  if (sorted != plain_order(comm_->hosts())) {
    return {Code::kCorrupt,
            "host 0 sent an order of a ring that does not name each host once: " + order_text(ring.order)};
  }
  settle(ring.order, ring.text);
  return Status::ok();
}

// ---- ends

void RingSurvey::departing(int peer) {
  if (settled_ || !world() || !deciding()) return;
  settle_plain("host " + std::to_string(peer) + " left before their bandwidths were measured");
}

void RingSurvey::give_up() {
  if (!settled_) settle(plain_order(comm_->hosts()), "");
}

void RingSurvey::free_buffers() {
  out_ = {};
  in_ = {};
}

}  // namespace bagua
