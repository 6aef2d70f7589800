// Residuals of error feedback: sides, and what is kept when hosts change, or the process is killed.
#include "engine/values/residuals.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "harness.h"

namespace bagua {
namespace {

constexpr uint64_t kCount = 12;

// A store with the table of a communicator.
struct Kept {
  explicit Kept(int memory = -1) : store(&bytes) {
    CHECK_OK(store.open(memory));
    store.begin({0, 1});
    table = store.take(0, 1, {0, 1});
  }
  uint64_t residual_bytes() const { return bytes.load(); }

  std::atomic<uint64_t> bytes{0};
  ResidualStore store;
  ResidualTable* table = nullptr;
};

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
  const Kept kept, single;
  const ResidualShape shape = shape_of(0, 2, false);
  written_of(kept.table, shape, kRead0Write1)[3] = 7;
  EXPECT_EQ(read_of(kept.table, shape, kRead0Write1)[3], 0.0f);  // a repetition
  EXPECT_EQ(read_of(kept.table, shape, kRead1Write0)[3], 7.0f);  // the next step
  EXPECT_EQ(kept.residual_bytes(), uint64_t{2 * 4096});
  EXPECT_EQ(read_of(single.table, shape), static_cast<const float*>(written_of(single.table, shape)));
  EXPECT_EQ(single.residual_bytes(), uint64_t{4096});
}

TEST(another_count_is_refused) {
  const Kept kept;
  written_of(kept.table, {kCount, 0, 1, 2, false});
  ResidualPlaces places;
  EXPECT(kept.table->find(1, {kCount + 1, 0, 1, 2, false}, kInPlace, &places).code() == Code::kInvalid);
}

// Three hosts become two: the blocks move. What results have lost is the same, but for what the third host held.
TEST(blocks_change_their_owner) {
  for (const bool mean : {false, true}) {
    const Kept first, second;
    const std::vector<ResidualTable*> tables{first.table, second.table};
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
  const Kept kept;
  ResidualTable& table = *kept.table;
  written_of(&table, shape_of(0, 3, true), kRead0Write1)[11] = 6;
  written_of(&table, shape_of(0, 3, true), kRead1Write0)[11] = 3;
  const ResidualShape alone{kCount, 0, kCount, 1, true};
  EXPECT_EQ(read_of(&table, alone, kRead0Write1)[11], 1.0f);
  EXPECT_EQ(read_of(&table, alone, kRead1Write0)[11], 2.0f);
}

TEST(sums_become_means) {
  const Kept kept;
  ResidualTable& table = *kept.table;
  float* const values = written_of(&table, shape_of(0, 2, false));
  values[0] = values[11] = 8;
  const float* const now = read_of(&table, shape_of(0, 2, true));
  EXPECT_EQ(now[0], 4.0f);   // its own block: half of the sum that was lost
  EXPECT_EQ(now[11], 8.0f);  // its contribution, divided with all others later
}

TEST(elements_move_to_other_residuals) {
  Kept kept;
  // 12 elements of a mean over 2 ranks: this host owns the first half, where they are in terms of results.
  const ResidualShape before = shape_of(0, 2, true);
  float* const from = written_of(kept.table, before, kRead0Write1);
  for (uint64_t i = 0; i < kCount; ++i) from[i] = static_cast<float>(i + 1);
  const auto row = [](int64_t to, int64_t count, int64_t begin, int64_t at, int64_t length) {
    return ResidualMove{to, count, begin, 1, at, 1, length};
  };
  // Cut into 8 and 4 elements, with a tail of one behind each; residual 9 was never used.
  const std::vector<ResidualMove> rows{row(2, 9, 0, 0, 8), row(3, 5, 0, 8, 4), {3, 5, 0, 9, 0, 0, 4}};
  CHECK_OK(kept.table->move(rows));
  ResidualPlaces places;
  const ResidualShape first{9, 0, 5, 2, true}, second{5, 0, 3, 2, true};
  CHECK_OK(kept.table->find(2, first, kRead0Write1, &places));
  const auto* moved = reinterpret_cast<const float*>(places.carried);
  EXPECT_EQ(moved[4], 5.0f);      // this host's before and now
  EXPECT_EQ(moved[5], 6.0f * 2);  // another's now: divided with all others later
  EXPECT_EQ(moved[7], 8.0f);      // another's before and now
  EXPECT_EQ(moved[8], 0.0f);      // the tail
  CHECK_OK(kept.table->find(3, second, kRead0Write1, &places));
  moved = reinterpret_cast<const float*>(places.carried);
  EXPECT_EQ(moved[0], 9.0f / 2);  // this host's now
  EXPECT_EQ(moved[3], 12.0f);
  EXPECT_EQ(read_of(kept.table, before, kRead1Write0)[11], 12.0f);  // the last ones stay, until they are given back
  const uint64_t held = kept.residual_bytes();
  CHECK_OK(kept.table->move({{0, 0, 0, 1, 0, 0, 0}}));
  EXPECT_EQ(kept.residual_bytes() < held, true);
  EXPECT_EQ(read_of(kept.table, before, kRead1Write0)[11], 0.0f);  // made anew
}

TEST(moves_that_do_not_fit_change_nothing) {
  Kept kept;
  written_of(kept.table, shape_of(0, 2, true))[0] = 1;
  const uint64_t held = kept.residual_bytes();
  const auto refused = [&](const ResidualMove& wrong) {
    const std::vector<ResidualMove> rows{{2, 12, 0, 1, 0, 0, 12}, {0, 0, 0, 1, 0, 0, 0}, wrong};
    EXPECT_EQ(kept.table->move(rows).code(), Code::kInvalid);
    EXPECT_EQ(kept.residual_bytes(), held);
    EXPECT_EQ(read_of(kept.table, shape_of(0, 2, true))[0], 1.0f);
  };
  refused({3, 12, 1, 1, 0, 0, 12});  // beyond the end of the new one
  refused({3, 12, 0, 1, 1, 0, 12});  // of the old one
  refused({3, 12, -1, 1, 0, 0, 1});
  refused({3, 12, 0, 1, 0, 0, -1});
  refused({3, 12, 0, 1, 0, 2, 1});  // a third side
  refused({1, 12, 0, 1, 0, 0, 1});  // onto one that is there
  refused({2, 13, 0, 1, 0, 0, 1});  // another length than in its first row
  refused({int64_t{1} << 32, 12, 0, 1, 0, 0, 1});
  refused({3, int64_t{1} << 62, 0, 1, 0, 0, int64_t{1} << 62});
}

TEST(successors) {
  Kept kept;
  ResidualStore& store = kept.store;
  store.begin({3, 2, 1, 0});
  const auto fill = [&](uint32_t comm, uint64_t instance, const ResidualStore::Members& members) {
    written_of(store.take(comm, instance, members), shape_of(0, 2, false))[0] =
        static_cast<float>(comm == 0 ? 4 : comm);
  };
  fill(0, 1, {0, 1, 2, 3});
  fill(5, 2, {0, 2, 3});
  fill(6, 3, {0, 1});
  store.begin({0, 1, 2, 9});  // 3 has gone, 9 has come
  const auto first = [&](uint32_t comm, uint64_t instance, const ResidualStore::Members& members) {
    return read_of(store.take(comm, instance, members), shape_of(0, 2, false))[0];
  };
  EXPECT_EQ(first(0, 1, {0, 1, 2, 9}), 4.0f);
  EXPECT_EQ(first(5, 2, {0, 2, 9}), 5.0f);
  EXPECT_EQ(first(6, 3, {1, 2}), 0.0f);  // another one
  EXPECT_EQ(first(6, 4, {0, 1}), 6.0f);  // the same
  EXPECT_EQ(kept.residual_bytes(), uint64_t{4 * 4096});
  store.begin({0, 1, 2, 9});  // in which the ranks use no residual, so they may come back to each
  store.begin({0, 1, 2, 10});
  EXPECT_EQ(first(5, 2, {0, 2, 10}), 5.0f);
  EXPECT_EQ(kept.residual_bytes(), uint64_t{4 * 4096});
  store.begin({0, 1, 2, 10});  // nobody took the others
  EXPECT_EQ(kept.residual_bytes(), uint64_t{4096});
}

// Memory of a file that is really there.
static uint64_t held_by(int file) {
  struct stat info{};
  fstat(file, &info);
  return static_cast<uint64_t>(info.st_blocks) * 512;
}

// A store that is never destroyed is what a process leaves that was killed. Static: known to LeakSanitizer.
TEST(a_killed_process_leaves_all_residuals) {
  const Fd memory(memfd_create("test", 0));
  static auto* const killed = new Kept(memory.get());
  const ResidualShape before = shape_of(0, 3, true), shape = shape_of(0, 2, true);
  written_of(killed->table, before, kRead0Write1)[3] = 6;
  read_of(killed->table, shape, kRead1Write0);  // converted: 6 / 3 in the own block
  written_of(killed->table, shape, kRead1Write0)[5] = 8;
  killed->store.begin({0, 1});
  written_of(killed->store.take(0, 1, {0, 1}), shape, kRead0Write1)[7] = 9;  // a step that did not count
  written_of(killed->store.take(4, 2, {0, 1}), shape)[1] = 5;
  killed->store.begin({0, 1});  // and one in which nothing was taken yet

  const uint64_t held = held_by(memory.get());
  static auto* const next = new Kept(memory.get());
  EXPECT_EQ(next->residual_bytes(), killed->residual_bytes());
  EXPECT_EQ(read_of(next->table, shape, kRead1Write0)[3], read_of(killed->table, shape, kRead1Write0)[3]);
  EXPECT_EQ(read_of(next->table, shape, kRead0Write1)[5], 8.0f);
  EXPECT_EQ(read_of(next->store.take(4, 2, {0, 1}), shape)[1], 5.0f);
  EXPECT(held_by(memory.get()) <= held);

  next->store.clear();
  Kept last(memory.get());
  EXPECT_EQ(read_of(last.table, shape, kRead0Write1)[5], 0.0f);
  EXPECT(held_by(memory.get()) <= uint64_t{3 * 4096});
}

// The index is written beside the last one: what was begun and not published is forgotten.
TEST(memory_that_no_index_names_is_given_back) {
  const Fd memory(memfd_create("test", 0));
  static auto* const killed = new Vault;
  CHECK_OK(killed->open(memory.get()));
  static auto* const named = new Vault::Area;
  static auto* const lost = new Vault::Area;
  CHECK_OK(killed->make(100, named));
  killed->publish({named->place(), 7});
  CHECK_OK(killed->make(1 << 20, lost));
  named->data()[99] = 'a';
  for (size_t i = 0; i < lost->bytes(); i += 4096) lost->data()[i] = 'b';
  Vault next;
  CHECK_OK(next.open(memory.get()));
  const Vault::Words index = next.index();
  CHECK_EQ(index.size(), size_t{2});
  next.keep_only({{index[0], 4096}});
  EXPECT_EQ(held_by(memory.get()), uint64_t{3 * 4096});
  Vault::Area found;
  CHECK_OK(next.find(index[0], 100, &found));
  EXPECT_EQ(found.data()[99], 'a');
  EXPECT(next.find(index[0], uint64_t{1} << 40, &found).code() == Code::kCorrupt);
  EXPECT(next.find(index[0] + 1, 1, &found).code() == Code::kCorrupt);
}

}  // namespace bagua
