// All-reduce with encoded messages between hosts (scatter-gather): host h owns block h.
//
//   a) each host encodes its partial sum of each other host's block, with error feedback if requested, and sends it to
//      the owner;
//   b) the owner adds all messages to its own partial sum, divides for AVG, encodes the result and sends it to all. It
//      writes decode(result) to its own ranks, so that all hosts have the same bits;
//   c) the other hosts decode the result into the dst of all their ranks.
//
// 2 (hosts - 1) / hosts of the encoded vector cross each link. Each pass reads and writes memory once: a) reads the
// vector without the own block, b) reads and writes the own block, c) writes the other blocks.
//
// Order. Round k sends chunk k of a), then chunk k - lead of b). So the first results go out while later partials are
// still being sent. No window fills up for ever: a pass of round k waits only for slots that earlier sends and passes
// release (a window of results holds at least `lead`). It works in place, because every host has read its own
// contribution to a block before the result can come back.
#include "codec/formats.h"
#include "collective/builder.h"

namespace bagua::collective {

namespace {

// Owners' blocks and their chunks begin at multiples of this, so that the codec's blocks are complete.
uint64_t unit_of(Encoding encoding) {
  return encoding.codec == Codec::kTopK ? codec::kTopKBlock : codec::kTile;
}

constexpr size_t kMessages = 4;             // a message has about chunk_bytes / kMessages bytes
constexpr size_t kLargestRaw = 4;           // a raw chunk has at most kLargestRaw * chunk_bytes bytes
constexpr uint64_t kPieces = 8;             // a block has at least this many chunks, so that its stages overlap,
constexpr uint64_t kSmallestChunk = 16384;  // unless a chunk would have fewer elements than this
// Partials that are sent before the first result: bytes, to cover the delay of a round trip, and limits in chunks.
constexpr size_t kLeadBytes = 2 << 20;
constexpr size_t kLeastLead = 4, kMostLead = 32;
constexpr size_t kMessageWindow = 8, kSmallWindow = 4;  // waiting messages of one peer; with more than two peers

uint64_t units_of(uint64_t elements, uint64_t unit) {
  return std::max<uint64_t>(1, (elements + unit - 1) / unit);
}

// The part of `count` elements that host `host` owns.
Range encoded_block(uint64_t count, uint64_t unit, int hosts, int host) {
  const Range part = part_of(units_of(count, unit), hosts, host);
  const uint64_t begin = std::min(part.begin * unit, count);
  return {begin, std::min((part.begin + part.count) * unit, count) - begin};
}

class Compressed {
 public:
  Compressed(Builder* b, Range range)
      : b_(b), range_(range), encoding_(b->request().encoding), unit_(unit_of(encoding_)), peers_(b->others()) {
    choose_chunk();
    const size_t message = encoded_bytes(encoding_, chunk_), n = peers_.size();
    lead_ = std::clamp(kLeadBytes / (message * n), kLeastLead, kMostLead);
    for (int h = 0; h < b->hosts(); ++h) blocks_.push_back(b->chunks(block(h), chunk_));
    const size_t window = n > 2 ? kSmallWindow : kMessageWindow, mine = own().size();
    for (const int peer : peers_) {
      const size_t theirs = chunks_at(peer).size();
      outgoing_.emplace_back(b, std::min(window, theirs), message);
      partials_.emplace_back(b, std::min(window, mine), message);
      arriving_.emplace_back(b, std::min(window, theirs), message);
    }
    for (size_t i = 0; i < std::min(lead_, mine); ++i) results_.push_back(b->scratch(message));
    result_sent_.resize(results_.size());
  }

  void build() {
    size_t longest = 0;
    for (const auto& chunks : blocks_) longest = std::max(longest, chunks.size());
    for (size_t round = 0; round < longest + lead_; ++round) {
      for (size_t p = 0; p < peers_.size(); ++p) {
        if (round < chunks_at(peers_[p]).size()) send_partial(p, chunks_at(peers_[p])[round]);
      }
      if (round >= lead_ && round - lead_ < own().size()) send_result(round - lead_);
      if (round < own().size()) combine(round);
      for (size_t p = 0; p < peers_.size(); ++p) {
        const auto& chunks = chunks_at(peers_[p]);
        if (round >= lead_ && round - lead_ < chunks.size()) receive_result(p, chunks[round - lead_]);
      }
    }
  }

 private:
  // All hosts must choose the same, so nothing here may depend on the host.
  void choose_chunk() {
    const uint64_t raw = std::max<uint64_t>(unit_, b_->chunk_bytes() / sizeof(float) / unit_ * unit_);
    chunk_ = raw;
    while (chunk_ < kLargestRaw * raw && encoded_bytes(encoding_, chunk_) * kMessages < b_->chunk_bytes()) chunk_ *= 2;
    while (chunk_ > unit_ && encoded_bytes(encoding_, chunk_) > b_->chunk_bytes()) chunk_ = units(chunk_ / 2) * unit_;
    const uint64_t piece = std::max(kSmallestChunk, units(block(0).count / kPieces) * unit_);
    chunk_ = std::min({chunk_, piece, units(block(0).count) * unit_});
  }

  uint64_t units(uint64_t elements) const { return units_of(elements, unit_); }

  Range block(int host) const {
    const Range block = encoded_block(range_.count, unit_, b_->hosts(), host);
    return {range_.begin + block.begin, block.count};
  }

  const std::vector<Range>& chunks_at(int host) const { return blocks_[static_cast<size_t>(host)]; }
  const std::vector<Range>& own() const { return chunks_at(b_->host()); }
  size_t bytes(const Range& chunk) const { return encoded_bytes(encoding_, chunk.count); }

  // Sources of a pass: y is the sum of this host's ranks, plus the residual if there is one.
  Pass pass_over(const Range& chunk, const Ref* residual) const {
    Pass pass;
    pass.count = chunk.count;
    pass.raw = b_->all_src(chunk.begin);
    if (b_->request().feedback) pass.residual = residual;
    return pass;
  }
  static Ref residual_at(const Range& chunk) { return {Space::kResidual, 0, chunk.begin * sizeof(float)}; }

  void send_partial(size_t p, const Range& chunk) {
    StepId free_after;
    const Ref message = outgoing_[p].take(&free_after), residual = residual_at(chunk);
    Pass pass = pass_over(chunk, &residual);
    pass.message = &message;
    const StepId encoded = b_->transcode(pass, {free_after});
    outgoing_[p].release_after(b_->send_bytes(peers_[p], message, bytes(chunk), {encoded}));
  }

  // Computes the result of chunk k of the own block.
  void combine(size_t k) {
    const Range& chunk = own()[k];
    const size_t slot = k % results_.size();
    const Ref residual = residual_at(chunk);
    Pass pass = pass_over(chunk, &residual);
    std::vector<StepId> before = result_sent_[slot];
    pass.encoded.resize(static_cast<size_t>(b_->hosts()));
    for (size_t p = 0; p < peers_.size(); ++p) {
      StepId free_after;
      const Ref place = partials_[p].take(&free_after);
      before.push_back(b_->recv_bytes(peers_[p], place, bytes(chunk), {free_after}));
      pass.encoded[static_cast<size_t>(peers_[p])] = place;
    }
    pass.encoded.erase(pass.encoded.begin() + b_->host());
    pass.message = &results_[slot];
    pass.decoded = b_->all_dst(chunk.begin);
    pass.final = true;
    const StepId result = b_->transcode(pass);
    for (const StepId step : before) b_->depend(result, step);
    for (Window& window : partials_) window.release_after(result);
    combined_.push_back(result);
  }

  void send_result(size_t k) {
    const size_t slot = k % results_.size();
    result_sent_[slot].clear();
    for (const int peer : peers_) {
      const StepId sent = b_->send_bytes(peer, results_[slot], bytes(own()[k]), {combined_[k]});
      result_sent_[slot].push_back(sent);
    }
  }

  void receive_result(size_t p, const Range& chunk) {
    StepId free_after;
    const Ref message = arriving_[p].take(&free_after);
    const StepId arrived = b_->recv_bytes(peers_[p], message, bytes(chunk), {free_after});
    Pass pass;
    pass.count = chunk.count;
    pass.encoded = {message};
    pass.decoded = b_->all_dst(chunk.begin);
    arriving_[p].release_after(b_->transcode(pass, {arrived}));
  }

  Builder* const b_;
  const Range range_;
  const Encoding encoding_;
  const uint64_t unit_;
  const std::vector<int> peers_;
  uint64_t chunk_ = 0;  // elements
  size_t lead_ = kLeastLead;
  std::vector<std::vector<Range>> blocks_;              // chunks, by owner
  std::vector<Window> outgoing_, partials_, arriving_;  // by peer: a) to it, a) from it, b) from it
  std::vector<Ref> results_;                            // b) to all
  std::vector<std::vector<StepId>> result_sent_;        // by slot: its latest sends
  std::vector<StepId> combined_;                        // by own chunk
};

}  // namespace

void build_compressed(Builder* b, Range range) {
  Compressed(b, range).build();
}

OwnBlock own_block(const Topology& topology, const Request& request) {
  const Range mine =
      encoded_block(request.count - request.exact, unit_of(request.encoding), topology.hosts(), topology.host);
  return {mine.begin, mine.begin + mine.count};
}

}  // namespace bagua::collective
