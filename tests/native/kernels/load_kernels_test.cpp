// bagua_kernels_load() loads each kernel that any call launches, and launches none.
#include "kernel/reduce.h"
#include "rig.h"

namespace bagua {
namespace {

void launch_all_codecs() {
  for (int number = 0; number < kCodecs; ++number) {
    const auto codec = static_cast<Codec>(number);
    const Encoding encoding{codec, static_cast<uint16_t>(codec == Codec::kTopK ? 900 : 0)};
    for (const size_t count : {size_t{3}, size_t{16384}, size_t{20000}}) {
      for (const size_t shift : {size_t{0}, size_t{4}}) {
        test::compare(encoding, count, {1, 0, 1.0f, false, true, 1, true, shift}, test::Kind::kUsual);
      }
    }
  }
}

void launch_all_reductions() {
  float value[2] = {1, 2};
  const void* inputs[] = {value};
  for (int dtype = 0; dtype < 256; ++dtype) {
    for (int op = 0; op < 256; ++op) {
      const BaguaReduce work{static_cast<uint8_t>(dtype), static_cast<uint8_t>(op), 1, inputs, 1, value, 1};
      const int code = bagua_kernels_reduce(&work, nullptr);
      EXPECT_EQ(code == 0, dtype < kDTypes && op_supported(static_cast<DType>(dtype), static_cast<ReduceOp>(op)));
    }
  }
}

TEST(every_kernel) {
  emulation::launched.clear();  // by other suites
  EXPECT_EQ(bagua_kernels_load(), 0);
  EXPECT(emulation::launched.empty());
  const auto loaded = emulation::loaded;
  launch_all_codecs();
  launch_all_reductions();
  EXPECT_EQ(loaded.size(), emulation::launched.size());
  EXPECT(loaded == emulation::launched);
}

}  // namespace
}  // namespace bagua
