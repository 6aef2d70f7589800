// Compressed all-reduces against a plain implementation of the same mathematics, run as in collective_rig.h.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "codec/codec.h"
#include "collective_rig.h"

namespace bagua::collective {
namespace {

using Vector = std::vector<float>;

const std::vector<Members> kTopologies = {
    {{0}, {1}},           {{0, 1}, {2, 3}},
    {{0, 1, 2}, {3}},     {{0, 3}, {1}, {2, 4}},
    {{0}, {1}, {2}, {3}}, {{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7, 8}},
};

std::vector<Encoding> encodings() {
  std::vector<Encoding> all;
  for (int codec = 1; codec < kCodecs; ++codec) {
    all.push_back(
        {static_cast<Codec>(codec), static_cast<uint16_t>(codec == static_cast<int>(Codec::kTopK) ? 655 : 0)});
  }
  return all;
}

// A number that looks random, the same in every run.
float number(size_t step, size_t member, size_t i) {
  uint64_t x = (i * 1000 + member) * 1000 + step + 1;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  const double unit = static_cast<double>((x ^ (x >> 31)) >> 11) / 9007199254740992.0;
  return static_cast<float>((unit - 0.5) * (i % 7 == 3 ? 10 : 1));
}

// Encodes `y` into a message and decodes it.
Vector through(Encoding encoding, const Vector& y) {
  std::vector<char> room(encoded_bytes(encoding, y.size()) + 64);
  Vector decoded(y.size());
  Transcode work;
  work.encoding = encoding;
  work.count = y.size();
  work.raw = {y.data()};
  work.message = room.data() + (64 - reinterpret_cast<uintptr_t>(room.data()) % 64);
  work.decoded = {decoded.data()};
  transcode(work);
  return decoded;
}

// The mathematics of collective/compressed.cpp, one block and one host after the other.
class Reference {
 public:
  Reference(const Case& c) : case_(c), count_(c.request.count) {
    if (c.request.feedback) residuals_.assign(c.members.size(), Vector(count_, 0.0f));
  }

  Vector run() {
    Vector result(count_);
    const size_t hosts = case_.members.size(), encoded = count_ - case_.request.exact;
    const size_t all_units = (encoded + unit() - 1) / unit();
    for (size_t owner = 0, begin = 0; owner < hosts; ++owner) {
      const size_t units = all_units / hosts + (owner < all_units % hosts ? 1 : 0);
      const size_t end = std::min(encoded, begin + units * unit());
      if (begin < end) block(owner, begin, end, &result);
      begin = end;
    }
    for (size_t i = encoded; i < count_; ++i) {
      float total = 0;
      for (size_t h = 0; h < hosts; ++h) total = h == 0 ? partial(h, i) : total + partial(h, i);
      result[i] = case_.request.op == ReduceOp::kAvg ? total / static_cast<float>(ranks()) : total;
    }
    return result;
  }

 private:
  // Blocks of top-k have 16384 elements, those of the others divide 1024.
  size_t unit() const { return case_.request.encoding.codec == Codec::kTopK ? 16384 : 1024; }

  size_t ranks() const {
    size_t n = 0;
    for (const auto& there : case_.members) n += there.size();
    return n;
  }

  float partial(size_t host, size_t i) const {
    float sum = 0;
    for (size_t m = 0; m < case_.members[host].size(); ++m) {
      const float x = case_.input(static_cast<size_t>(case_.members[host][m]), i);
      sum = m == 0 ? x : sum + x;
    }
    return sum;
  }

  // Encodes y with what this host still owes, notes what it owes now.
  Vector say(size_t host, size_t begin, Vector y) {
    if (case_.request.feedback) {
      for (size_t i = 0; i < y.size(); ++i) y[i] += residuals_[host][begin + i];
    }
    const Vector said = through(case_.request.encoding, y);
    if (case_.request.feedback) {
      for (size_t i = 0; i < y.size(); ++i) residuals_[host][begin + i] = y[i] - said[i];
    }
    return said;
  }

  void block(size_t owner, size_t begin, size_t end, Vector* result) {
    Vector sum(end - begin);
    for (size_t i = begin; i < end; ++i) sum[i - begin] = partial(owner, i);
    for (size_t h = 0; h < case_.members.size(); ++h) {
      if (h == owner) continue;
      Vector y(end - begin);
      for (size_t i = begin; i < end; ++i) y[i - begin] = partial(h, i);
      const Vector said = say(h, begin, std::move(y));
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += said[i];
    }
    if (case_.request.op == ReduceOp::kAvg) {
      for (float& value : sum) value *= 1.0f / static_cast<float>(ranks());
    }
    const Vector said = say(owner, begin, std::move(sum));
    std::copy(said.begin(), said.end(), result->begin() + static_cast<std::ptrdiff_t>(begin));
  }

  const Case& case_;
  const size_t count_;
  std::vector<Vector> residuals_;
};

bool same_bits(const float* a, const float* b, size_t count) {
  return memcmp(a, b, count * sizeof(float)) == 0;
}

Case make_case(const Members& members, Encoding encoding, uint64_t count) {
  Case c;
  c.members = members;
  c.chunk_bytes = 4096;
  c.request.kind = Kind::kAllReduce;
  c.request.op = ReduceOp::kSum;
  c.request.count = count;
  c.request.encoding = encoding;
  return c;
}

size_t size_of(const Members& members) {
  return static_cast<size_t>(Topology{members, 0}.size());
}

// Runs `steps` all-reduces one after the other, with the same residuals; all ranks must end with the reference's bits.
void run_steps(Case c, size_t steps, unsigned seed) {
  std::vector<Vector> residuals(c.members.size(), Vector(c.request.feedback ? c.request.count : 0, 0.0f));
  Reference reference(c);
  size_t step = 0;
  c.input = [&step](size_t member, size_t i) { return number(step, member, i); };
  for (; step < steps; ++step) {
    const Vector wanted = reference.run();
    Simulation simulation(c, seed + static_cast<unsigned>(step), &residuals);
    simulation.allow(8192);
    CHECK(simulation.run());
    for (size_t i = 0; i < size_of(c.members); ++i) {
      CHECK(same_bits(simulation.target(i), wanted.data(), wanted.size()));
    }
  }
}

}  // namespace

TEST(every_codec_is_the_reference_bit_for_bit) {
  for (const Members& members : kTopologies) {
    for (const Encoding encoding : encodings()) {
      for (const uint64_t count : {1, 3, 1000, 2049, 40'001}) {
        Case c = make_case(members, encoding, count);
        c.in_place = count % 2 == 1;
        run_steps(c, 1, 1);
      }
    }
  }
}

TEST(error_feedback_over_steps) {
  for (const Members& members : {kTopologies[1], kTopologies[3], kTopologies[5]}) {
    for (const Encoding encoding : encodings()) {
      Case c = make_case(members, encoding, 20'005);
      c.request.feedback = true;
      c.request.exact = 5;
      run_steps(c, 4, 2);
    }
  }
}

TEST(mean_divides_once) {
  for (const Encoding encoding : encodings()) {
    Case c = make_case(kTopologies[1], encoding, 9000);  // four ranks: the division is exact
    c.request.op = ReduceOp::kAvg;
    c.request.feedback = true;
    c.request.exact = 100;
    run_steps(c, 3, 3);
  }
}

// Negative zeros, infinities, nan and denormals: the same bits at all hosts, whatever they become.
TEST(special_values_have_the_same_bits_everywhere) {
  const Vector special = {-0.0f, 0.0f, INFINITY, -INFINITY, NAN, 1e-42f, 3e38f, -1.0f};
  for (const Encoding encoding : encodings()) {
    for (const bool feedback : {false, true}) {
      Case c = make_case(kTopologies[3], encoding, 7000);
      c.request.feedback = feedback;
      // Zeros alone in one part, so that the others don't hide them.
      c.input = [&special](size_t, size_t i) { return special[i < 3000 ? i % 2 : i % special.size()]; };
      std::vector<Vector> residuals(3, Vector(feedback ? 7000 : 0, 0.0f));
      Simulation simulation(c, 7, &residuals);
      simulation.allow(8192);
      CHECK(simulation.run());
      for (size_t rank = 1; rank < 5; ++rank) CHECK(same_bits(simulation.target(0), simulation.target(rank), 7000));
    }
  }
}

TEST(one_host_encodes_nothing) {
  Case c = make_case({{0, 1}}, {Codec::kSign1, 0}, 500);
  Simulation simulation(c, 1);
  CHECK(simulation.run());
  simulation.check();
}

// 2 (hosts - 1) / hosts of the encoded vector leave each host, whatever the number of its ranks, in messages that are
// neither tiny nor few.
TEST(bytes_and_messages) {
  const uint64_t count = 1 << 24;
  for (const Encoding encoding : encodings()) {
    for (const Members& members : {kTopologies[0], kTopologies[1], kTopologies[4]}) {
      Request request;
      request.kind = Kind::kAllReduce;
      request.count = count;
      request.encoding = encoding;
      request.feedback = true;
      const size_t hosts = members.size(), share = count / hosts;
      const Program program = compile(Topology{members, 1}, request, 512 << 10);
      uint64_t sent = 0, messages = 0, longest = 0;
      for (const Step& step : program.steps) {
        if (step.type != Step::Type::kSend) continue;
        sent += step.bytes;
        ++messages;
        longest = std::max(longest, step.bytes);
      }
      CHECK_EQ(sent, 2 * (hosts - 1) * encoded_bytes(encoding, share));
      CHECK(longest <= 512 << 10);
      CHECK(messages >= 2 * (hosts - 1) * 8);
      CHECK(program.scratch_bytes <= 12 << 20);
    }
  }
}

}  // namespace bagua::collective
