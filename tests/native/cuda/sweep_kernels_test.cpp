// Every number of elements from 1 to 5000, for every codec: runs with --full.
#include "rig.h"

namespace bagua {
namespace {

TEST(every_count) {
  const Encoding encodings[] = {{Codec::kNone, 0}, {Codec::kF16, 0},   {Codec::kBF16, 0},
                                {Codec::kE4M3, 0}, {Codec::kE5M2, 0},  {Codec::kMinMax8, 0},
                                {Codec::kInt4, 0}, {Codec::kSign1, 0}, {Codec::kTopK, 900}};
  for (const Encoding& encoding : encodings) {
    for (size_t count = 1; count <= 5000; ++count) {
      const size_t shift = count % 3 == 0 ? 4 : 0;
      const auto kind = test::kKinds[count % 7];
      emulation::set_order(static_cast<int>(count % 2));
      // Of two NaN that are added any may be the sum: compilers differ. Values with NaN are only encoded and decoded.
      const bool nan = kind == test::Kind::kOdd;
      const test::Way way{1, nan ? 0 : 1, nan ? 1.0f : 0.5f, !nan, true, 1, true, shift};
      test::compare(encoding, count, way, kind);
    }
  }
}

}  // namespace
}  // namespace bagua
