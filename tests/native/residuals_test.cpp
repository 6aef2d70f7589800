// Residuals of error feedback: sides, and what is kept when hosts change.
#include "engine/residuals.h"

#include <atomic>
#include <string>
#include <vector>

#include "harness.h"

namespace bagua {
namespace {

constexpr uint64_t kCount = 12;

const float* read_of(ResidualTable* table, const ResidualShape& shape, ResidualSides sides = kInPlace) {
  ResidualPlaces places;
  CHECK_OK(table->find(1, shape, sides, &places));
  return reinterpret_cast<const float*>(places.carried);
}

float* written_of(ResidualTable* table, const ResidualShape& shape, ResidualSides sides = kInPlace) {
  ResidualPlaces places;
  CHECK_OK(table->find(1, shape, sides, &places));
  return reinterpret_cast<float*>(places.written);
}

// Hosts own equal blocks, one after the other.
ResidualShape shape_of(uint64_t host, uint64_t hosts, bool mean) {
  const uint64_t block = kCount / hosts;
  return {kCount, host * block, (host + 1) * block, static_cast<uint32_t>(hosts), mean};
}

// The loss of results at element `i`, by the residuals of all hosts.
float lost(const std::vector<const float*>& residuals, const std::vector<ResidualShape>& shapes, uint64_t i) {
  float all = 0;
  for (size_t h = 0; h < residuals.size(); ++h) {
    const bool own = i >= shapes[h].begin && i < shapes[h].end;
    all += residuals[h][i] / (own || !shapes[h].mean ? 1.0f : static_cast<float>(shapes[h].ranks));
  }
  return all;
}

}  // namespace

TEST(an_operation_reads_one_side_and_writes_the_other) {
  std::atomic<uint64_t> bytes{0};
  ResidualTable table(&bytes);
  const ResidualShape shape = shape_of(0, 2, false);
  written_of(&table, shape, kRead0Write1)[3] = 7;
  EXPECT_EQ(read_of(&table, shape, kRead0Write1)[3], 0.0f);  // a repetition
  EXPECT_EQ(read_of(&table, shape, kRead1Write0)[3], 7.0f);  // the next step
  EXPECT_EQ(bytes.load(), uint64_t{2 * 4096});
  ResidualTable single(&bytes);
  EXPECT_EQ(read_of(&single, shape), static_cast<const float*>(written_of(&single, shape)));
  EXPECT_EQ(bytes.load(), uint64_t{3 * 4096});
}

TEST(another_count_is_refused) {
  std::atomic<uint64_t> bytes{0};
  ResidualTable table(&bytes);
  written_of(&table, {kCount, 0, 1, 2, false});
  ResidualPlaces places;
  EXPECT(table.find(1, {kCount + 1, 0, 1, 2, false}, kInPlace, &places).code() == Code::kInvalid);
}

// Three hosts become two: the blocks move. What results have lost is the same, but for what the third host held.
TEST(blocks_change_their_owner) {
  for (const bool mean : {false, true}) {
    std::atomic<uint64_t> bytes{0};
    ResidualTable first(&bytes), second(&bytes);
    const std::vector<ResidualTable*> tables{&first, &second};
    std::vector<ResidualShape> before, after;
    std::vector<const float*> residuals;
    for (uint64_t host = 0; host < 2; ++host) {
      before.push_back(shape_of(host, 3, mean));
      after.push_back(shape_of(host, 2, mean));
      float* const values = written_of(tables[host], before[host]);
      for (uint64_t i = 0; i < kCount; ++i) values[i] = static_cast<float>(6 * (i + 1) * (host + 1));
      residuals.push_back(values);
    }
    std::vector<float> wanted;
    for (uint64_t i = 0; i < kCount; ++i) wanted.push_back(lost(residuals, before, i));
    for (size_t host = 0; host < 2; ++host) residuals[host] = read_of(tables[host], after[host]);
    for (uint64_t i = 0; i < kCount; ++i) CHECK_EQ(lost(residuals, after, i), wanted[i]);
    // Element 5: of host 1 before, of host 0 after.
    EXPECT_EQ(residuals[0][5], mean ? 36.0f / 3 : 36.0f);
    EXPECT_EQ(residuals[1][5], mean ? 72.0f * 2 : 72.0f);
  }
}

TEST(both_sides_are_converted) {
  std::atomic<uint64_t> bytes{0};
  ResidualTable table(&bytes);
  written_of(&table, shape_of(0, 3, true), kRead0Write1)[11] = 6;
  written_of(&table, shape_of(0, 3, true), kRead1Write0)[11] = 3;
  const ResidualShape alone{kCount, 0, kCount, 1, true};
  EXPECT_EQ(read_of(&table, alone, kRead0Write1)[11], 1.0f);
  EXPECT_EQ(read_of(&table, alone, kRead1Write0)[11], 2.0f);
}

TEST(sums_become_means) {
  std::atomic<uint64_t> bytes{0};
  ResidualTable table(&bytes);
  float* const values = written_of(&table, shape_of(0, 2, false));
  values[0] = values[11] = 8;
  const float* const now = read_of(&table, shape_of(0, 2, true));
  EXPECT_EQ(now[0], 4.0f);   // its own block: half of the sum that was lost
  EXPECT_EQ(now[11], 8.0f);  // its contribution, divided with all others later
}

TEST(successors) {
  std::atomic<uint64_t> bytes{0};
  ResidualStore store(&bytes);
  const auto fill = [&](uint32_t comm, uint64_t instance, const ResidualStore::Members& members) {
    ResidualTable* const table = store.take(comm, instance, members);
    written_of(table, shape_of(0, 2, false))[0] = static_cast<float>(comm == 0 ? 4 : comm);
    return table;
  };
  fill(0, 1, {0, 1, 2, 3});
  fill(5, 2, {0, 2, 3});
  fill(6, 3, {0, 1});
  store.carry_over({3, 2, 1, 0}, {0, 1, 2, 9});  // 3 has gone, 9 has come
  const auto first = [&](uint32_t comm, uint64_t instance, const ResidualStore::Members& members) {
    return read_of(store.take(comm, instance, members), shape_of(0, 2, false))[0];
  };
  EXPECT_EQ(first(0, 1, {0, 1, 2, 9}), 4.0f);
  EXPECT_EQ(first(5, 2, {0, 2, 9}), 5.0f);
  EXPECT_EQ(first(6, 3, {1, 2}), 0.0f);  // another one
  EXPECT_EQ(first(6, 4, {0, 1}), 6.0f);  // the same
  EXPECT_EQ(bytes.load(), uint64_t{4 * 4096});
  store.carry_over({0, 1, 2, 9}, {0, 1, 2, 9});
  store.carry_over({0, 1, 2, 9}, {0, 1, 2, 9});  // nobody took them
  EXPECT_EQ(bytes.load(), uint64_t{0});
}

}  // namespace bagua
