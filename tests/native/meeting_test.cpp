// Small collectives that ranks (threads here) do among themselves: who comes, who comes late, who calls something else,
// who leaves. Patience is either longer than a test may take, or none.
#include "channel/meeting.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "base/clock.h"
#include "harness.h"
#include "kernel/reduce.h"

namespace bagua {
namespace {

constexpr uint32_t kRanks = 4;
constexpr int64_t kLong = 250 * kNsPerS, kNone = 0;

constexpr uint32_t kNumber = 1;  // of the room

struct Room {
  std::unique_ptr<JobPage> job = std::make_unique<JobPage>();
  void* const memory =
      mmap(nullptr, kGenerationBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  GenerationPage* const page = new (memory) GenerationPage();
  MeetingRoom& room = page->rooms[kNumber];

  Room() = default;
  ~Room() { munmap(memory, kGenerationBytes); }
  Room(const Room&) = delete;
  Room& operator=(const Room&) = delete;

  Meeting seat(uint32_t own, int64_t patience_ns = kLong, uint32_t ranks = kRanks) {
    const int yields = static_cast<int>(own % 2), spins = static_cast<int>(own / 2 % 2) * 50;  // ranks differ
    return {&job->counters, page, kNumber, own, ranks, {spins, yields, patience_ns}};
  }
};

Descriptor all_reduce(uint64_t count, ReduceOp op = ReduceOp::kSum, DType dtype = DType::kF32) {
  Descriptor descriptor{};
  descriptor.kind = static_cast<uint8_t>(Kind::kAllReduce);
  descriptor.dtype = static_cast<uint8_t>(dtype);
  descriptor.op = static_cast<uint8_t>(op);
  descriptor.count = count;
  return descriptor;
}

Status usable() {
  return Status::ok();
}

// One rank's visit with `count` times the float `value`; what it finds then in `result`.
Status visit(Meeting&& meeting, uint32_t number, uint64_t count, float value, bool* met, float* result = nullptr) {
  std::vector<float> data(count, value);
  char* const bytes = reinterpret_cast<char*>(data.data());
  const Status status = meeting.attend(number, all_reduce(count), bytes, bytes, &usable, nullptr, met);
  if (result != nullptr) *result = data.back();
  return status;
}

}  // namespace

// The same bits as one call of the kernel, for every rank.
void check_results(size_t count) {
  Room room;
  std::vector<std::vector<float>> inputs(kRanks), results(kRanks, std::vector<float>(count));
  std::vector<const void*> sources;
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    for (size_t i = 0; i < count; ++i) inputs[rank].push_back(1.0f / static_cast<float>(1 + rank * 7919 + i));
    sources.push_back(inputs[rank].data());
  }
  std::vector<float> expected(count);
  void* target = expected.data();
  reduce(DType::kF32, ReduceOp::kAvg, sources.data(), kRanks, &target, 1, count, kRanks, false);
  test::Threads threads;
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    threads.start([&, rank] {
      bool met = false;
      CHECK_OK(room.seat(rank).attend(1, all_reduce(count, ReduceOp::kAvg),
                                      reinterpret_cast<const char*>(inputs[rank].data()),
                                      reinterpret_cast<char*>(results[rank].data()), &usable, nullptr, &met));
      CHECK(met);
    });
  }
  threads.join();
  for (const auto& result : results) EXPECT(memcmp(result.data(), expected.data(), count * 4) == 0);
  EXPECT_EQ(room.job->counters.ops.load(), 1u);
  EXPECT_EQ(room.job->counters.bytes_local.load(), kRanks * count * 4);
}

TEST(results_are_the_kernels) {
  check_results(999);
}

TEST(results_of_slices_are_the_kernels) {
  check_results(8193);  // the last slice is shorter
  check_results(50'000);
  check_results(kMeetingBytes / sizeof(float));
}

// The result at rank `rank` of kRanks of an operation on blocks of `count`, if element i of each source is
// 1000 * its rank + i.
std::vector<float> expected_of(Kind kind, uint32_t root, uint32_t rank, uint64_t count) {
  std::vector<float> found;
  const auto add = [&](uint32_t from, uint64_t begin) {
    for (uint64_t i = 0; i < count; ++i) found.push_back(static_cast<float>(1000 * from + begin + i));
  };
  const auto add_sum = [&](uint64_t begin) {
    for (uint64_t i = 0; i < count; ++i) found.push_back(static_cast<float>(6000 + 4 * (begin + i)));
  };
  if (kind == Kind::kAllReduce || (kind == Kind::kReduce && rank == root)) add_sum(0);
  if (kind == Kind::kReduceScatter) add_sum(rank * count);
  if (kind == Kind::kBroadcast) add(root, 0);
  if (kind == Kind::kScatter) add(root, rank * count);
  for (uint32_t from = 0; from < kRanks; ++from) {
    if (kind == Kind::kAllGather || (kind == Kind::kGather && rank == root)) add(from, 0);
    if (kind == Kind::kAllToAll) add(from, rank * count);
  }
  return found;
}

TEST(every_kind_and_root) {
  constexpr uint64_t kCount = 33;
  Room room;
  uint32_t number = 0;
  for (uint8_t kind = 0; kind_known(kind) && static_cast<Kind>(kind) != Kind::kSend; ++kind) {
    for (uint32_t root = 0; root < (kind_rooted(static_cast<Kind>(kind)) ? kRanks : 1); ++root) {
      ++number;
      test::Threads threads;
      for (uint32_t rank = 0; rank < kRanks; ++rank) {
        threads.start([&room, kind, root, rank, number] {
          Descriptor descriptor = all_reduce(kCount);
          descriptor.kind = kind;
          descriptor.root = static_cast<int32_t>(root);
          const Extent blocks = blocks_of(static_cast<Kind>(kind), rank == root, kRanks);
          std::vector<float> src(blocks.src * kCount), dst(blocks.dst * kCount);
          for (size_t i = 0; i < src.size(); ++i) src[i] = static_cast<float>(1000 * rank + i);
          bool met = false;
          CHECK(room.seat(rank).accepts(descriptor));
          CHECK_OK(room.seat(rank).attend(
              number, descriptor, src.empty() ? nullptr : reinterpret_cast<const char*>(src.data()),
              dst.empty() ? nullptr : reinterpret_cast<char*>(dst.data()), &usable, nullptr, &met));
          CHECK(met);
          CHECK(dst == expected_of(static_cast<Kind>(kind), root, rank, kCount));
        });
      }
    }
  }
}

TEST(what_no_meeting_takes) {
  Room room;
  Meeting seat = room.seat(0), alone = room.seat(0, kLong, 1);
  const auto taken = [&](const auto& change) {
    Descriptor descriptor = all_reduce(kMeetingBytes / sizeof(float));
    change(&descriptor);
    return seat.accepts(descriptor);
  };
  EXPECT(taken([](Descriptor*) {}));
  EXPECT(!taken([](Descriptor* d) { ++d->count; }));
  EXPECT(!taken([](Descriptor* d) { d->count = 0; }));
  EXPECT(!taken([](Descriptor* d) { d->codec = 1; }));
  EXPECT(!taken([](Descriptor* d) { d->dtype = kDTypes; }));
  EXPECT(!taken([](Descriptor* d) { d->op = 99; }));
  EXPECT(!taken([](Descriptor* d) { d->kind = static_cast<uint8_t>(Kind::kAllToAll); }));
  EXPECT(!taken([](Descriptor* d) { d->kind = static_cast<uint8_t>(Kind::kSend); }));
  EXPECT(!taken([](Descriptor* d) { d->kind = 200; }));
  EXPECT(!taken([](Descriptor* d) {
    d->kind = static_cast<uint8_t>(Kind::kBroadcast);
    d->root = kRanks;
  }));
  EXPECT(alone.accepts(all_reduce(uint64_t{1} << 30)));  // nothing travels
}

TEST(one_rank_alone_waits_for_nobody) {
  Room room;
  std::vector<float> src(100, 3), dst(100, 0);
  bool met = false;
  CHECK_OK(room.seat(0, kNone, 1)
               .attend(1, all_reduce(100, ReduceOp::kAvg), reinterpret_cast<const char*>(src.data()),
                       reinterpret_cast<char*>(dst.data()), &usable, nullptr, &met));
  EXPECT(met && src == dst);
}

// Rank 1 is stopped when it has brought its vector: the others reduce its slice by themselves.
TEST(a_slice_that_does_not_come_keeps_nobody_waiting) {
  constexpr uint64_t kCount = 20'000;
  Room room;
  const std::vector<float> ones(kCount, 1);
  Contribution& brought = room.room.seats[1].contributions[0];
  brought.call = {kCount, -1, static_cast<uint8_t>(Kind::kAllReduce), 0, 0};
  memcpy(vectors_of(room.page, kNumber)->brought[1][0], ones.data(), kCount * sizeof(float));
  brought.number.store(1);
  std::vector<float> found(kCount, 2);
  char* const bytes = reinterpret_cast<char*>(found.data());
  bool met = false;
  CHECK_OK(room.seat(0, kNone, 2).attend(1, all_reduce(kCount), bytes, bytes, &usable, nullptr, &met));
  EXPECT(met && found == std::vector<float>(kCount, 3));
}

// Many meetings one after another, numbers with gaps and across the end of the counter; some ranks have no patience.
// Whether they met, and the result, is the same for all.
TEST(all_meet_or_none_does) {
  constexpr uint32_t kMeetings = 1500, kFirst = (1u << 30) - 700;
  Room room;
  room.room.verdict.store(uint64_t{kFirst - 1} << 32 | ((kFirst - 1) << 2 | kMet));
  std::vector<std::vector<float>> found(kRanks, std::vector<float>(kMeetings, 0));
  test::Threads threads;
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    threads.start([&, rank] {
      for (uint32_t i = 0; i < kMeetings; ++i) {
        const int64_t patience = i % 5 == rank ? kNone : i % 3 == 0 ? 20'000 : kLong;
        bool met = false;
        float result = 0;
        CHECK_OK(visit(room.seat(rank, patience), kFirst + i * 2, 1 + i % 300, static_cast<float>(i), &met, &result));
        if (met) CHECK_EQ(result, static_cast<float>(i * kRanks));
        found[rank][i] = met ? 1.0f : 0.0f;
      }
    });
  }
  threads.join();
  for (uint32_t rank = 1; rank < kRanks; ++rank) EXPECT(found[rank] == found[0]);
}

TEST(a_rank_that_comes_late_finds_all_apart_and_meets_them_next_time) {
  Room room;
  bool met = true;
  CHECK_OK(visit(room.seat(0, kNone, 2), 7, 10, 1, &met));
  EXPECT(!met);
  CHECK_OK(visit(room.seat(1, kLong, 2), 7, 10, 1, &met));
  EXPECT(!met);
  CHECK_OK(visit(room.seat(1, kLong, 2), 6, 10, 1, &met));  // one that is far behind
  EXPECT(!met);
  test::Threads threads;
  for (uint32_t rank = 0; rank < 2; ++rank) {
    threads.start([&, rank] {
      bool together = false;
      float result = 0;
      CHECK_OK(visit(room.seat(rank, kLong, 2), 9, 10, 2, &together, &result));
      CHECK(together);
      CHECK_EQ(result, 4.0f);
    });
  }
}

TEST(nobody_waits_for_a_rank_that_has_submitted_the_operation) {
  Room room;
  Meeting(&room.job->counters, room.page, kNumber, 1, 2, {}).stay_away(5, all_reduce(10));
  bool met = true;
  CHECK_OK(visit(room.seat(0, kLong, 2), 5, 10, 1, &met));
  EXPECT(!met);
}

// The daemon finds the words: nobody waits until patience ends.
TEST(calls_that_differ_end_the_meeting_at_once) {
  Room room;
  test::Threads threads;
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    threads.start([&, rank] {
      bool met = true;
      CHECK_OK(visit(room.seat(rank), 1, rank == 2 ? 11 : 10, 1, &met));
      CHECK(!met);
    });
  }
}

TEST(one_who_is_interrupted_ends_the_meeting_for_all) {
  Room room;
  float value = 1;
  char* const bytes = reinterpret_cast<char*>(&value);
  bool met = true;
  const auto interrupted = [] { return true; };
  const Status status = room.seat(0, kNsPerMs).attend(1, all_reduce(1), bytes, bytes, &usable, interrupted, &met);
  EXPECT(status.code() == Code::kAborted && !met);
  CHECK_OK(visit(room.seat(1), 1, 1, 1, &met));
  EXPECT(!met);
}

TEST(an_error_of_the_engine_ends_the_meeting) {
  Room room;
  float value = 1;
  char* const bytes = reinterpret_cast<char*>(&value);
  const auto lost = []() -> Status { return {Code::kUnavailable, "rank 1 was lost"}; };
  bool met = true;
  const Status status = room.seat(0, kNsPerMs).attend(1, all_reduce(1), bytes, bytes, lost, nullptr, &met);
  EXPECT(test::has(status, "rank 1 was lost"));
  EXPECT(!met);
}

// Rank 1 is stopped while it reduces the vectors of meeting 1: the others have their results, and what it reads stays
// until it has gone on.
TEST(a_rank_that_is_stopped_keeps_its_vectors_and_nobody_waiting) {
  Room room;
  const auto both_meet = [&room](uint32_t number) {
    test::Threads threads;
    for (uint32_t rank = 0; rank < 2; ++rank) {
      threads.start([&room, rank, number] {
        bool met = false;
        CHECK_OK(visit(room.seat(rank, kLong, 2), number, 10, static_cast<float>(number), &met));
        CHECK(met);
      });
    }
  };
  const auto vectors = [&room](uint32_t number) {
    int found = 0;
    for (size_t i = 0; i < 2; ++i) {
      float value;
      memcpy(&value, vectors_of(room.page, kNumber)->brought[0][i], sizeof value);
      const Contribution& one = room.room.seats[0].contributions[i];
      found += one.number.load() == number && value == static_cast<float>(number);
    }
    return found;
  };
  both_meet(1);
  room.room.seats[1].left.store(0);  // it is still in meeting 1
  for (uint32_t number = 2; number < 6; ++number) {
    bool met = true;
    CHECK_OK(visit(room.seat(0, kNone, 2), number, 10, static_cast<float>(number), &met));
    EXPECT(!met);
    EXPECT_EQ(vectors(1), 1);
  }
  room.room.seats[1].left.store(1);
  both_meet(6);
  both_meet(7);
  EXPECT_EQ(vectors(1), 0);
}

}  // namespace bagua
