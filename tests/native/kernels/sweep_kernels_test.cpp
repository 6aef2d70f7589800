// Every number of elements from 1 to 5000, for every codec; of top-k, which has 512 threads for each of them, every one
// up to 300 and some beyond: runs with --full.
#include "rig.h"

namespace bagua {
namespace {

void sweep(Encoding encoding, size_t every_up_to, size_t step) {
  for (size_t count = 1; count <= 5000; count += count < every_up_to ? 1 : step) {
    const size_t shift = count % 3 == 0 ? 4 : 0;
    const auto kind = test::kKinds[count % 7];
    emulation::set_order(static_cast<int>(count % 2));
    // Of two NaN that are added any may be the sum: compilers differ. Values with NaN are only encoded and decoded.
    const bool nan = kind == test::Kind::kOdd;
    const test::Way way{1, nan ? 0 : 1, nan ? 1.0f : 0.5f, !nan, true, 1, true, shift};
    test::compare(encoding, count, way, kind);
  }
}

TEST(none) {
  sweep({Codec::kNone, 0}, 5000, 1);
}
TEST(fp16) {
  sweep({Codec::kF16, 0}, 5000, 1);
}
TEST(bf16) {
  sweep({Codec::kBF16, 0}, 5000, 1);
}
TEST(fp8_e4m3) {
  sweep({Codec::kE4M3, 0}, 5000, 1);
}
TEST(fp8_e5m2) {
  sweep({Codec::kE5M2, 0}, 5000, 1);
}
TEST(minmax8) {
  sweep({Codec::kMinMax8, 0}, 5000, 1);
}
TEST(int4) {
  sweep({Codec::kInt4, 0}, 5000, 1);
}
TEST(onebit) {
  sweep({Codec::kSign1, 0}, 5000, 1);
}
TEST(topk) {
  sweep({Codec::kTopK, 900}, 300, 37);
}

}  // namespace
}  // namespace bagua
