// Small messages: several go with one call of the kernel, and several are read with one.
#include <cstring>
#include <string>

#include "forged.h"

namespace bagua::nccl_net::rig {
namespace {

// Posts buffers for messages of these sizes, and tells afterwards whether each has what pattern(size, seed + i) makes.
class Buffers {
 public:
  Buffers(void* receiver, const std::vector<size_t>& sizes, uint64_t seed) : seed_(seed) {
    for (const size_t size : sizes) {
      buffers_.emplace_back(size, uint8_t{0xee});
      requests_.push_back(receive({nullptr, nullptr, receiver}, buffers_.back().data(), size));
    }
  }
  void* request(size_t index) const { return requests_[index]; }
  // Waits for the message.
  bool arrived(size_t index) const {
    int size = -1;
    return finish(requests_[index], &size) == kSuccess && static_cast<size_t>(size) == buffers_[index].size() &&
           buffers_[index] == pattern(buffers_[index].size(), seed_ + index);
  }

 private:
  uint64_t seed_;
  std::vector<std::vector<uint8_t>> buffers_;
  std::vector<void*> requests_;
};

// The bytes of such messages on the control socket, numbered from `first`.
std::string on_the_wire(uint64_t first, const std::vector<size_t>& sizes, uint64_t seed) {
  std::string out;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const std::vector<uint8_t> data = pattern(sizes[i], seed + i);
    out += small_header(first + i, sizes[i]);
    out.append(data.begin(), data.end());
  }
  return out;
}

TEST(a_batch_is_read_wherever_it_is_cut) {
  const Forged forged;
  const std::vector<size_t> sizes = {5, 0, 0, 70, 1, 8, kPaddedFrom, 0, kPaddedFrom - 1, 3, kPaddedFrom + 1, 9};
  const size_t all = on_the_wire(0, sizes, 0).size();
  uint64_t first = 0;
  for (size_t cut = 1; cut < all; cut += cut % kPaddedFrom < 200 || all - cut < 200 ? 1 : 97) {
    const Buffers buffers(forged.receiver, sizes, cut);
    const std::string bytes = on_the_wire(first, sizes, cut);
    put(forged.control, bytes.substr(0, cut));
    int done = 0;
    CHECK_EQ(net().test(buffers.request(sizes.size() - 1), &done, nullptr), kSuccess);
    CHECK_EQ(done, 0);
    put(forged.control, bytes.substr(cut));
    for (size_t i = sizes.size(); i-- > 0;) CHECK(buffers.arrived(i));
    first += sizes.size();
  }
}

TEST(an_end_in_the_middle_of_a_batch) {
  const std::vector<size_t> sizes = {5, 0, 70, 9};
  const std::string bytes = on_the_wire(0, sizes, 1);
  // In the first payload, in the header of an empty message, in the third message, just before the last.
  for (const size_t cut : {size_t{10}, size_t{17}, size_t{40}, bytes.size() - 17}) {
    Forged forged;
    const Buffers buffers(forged.receiver, sizes, 1);
    put(forged.control, bytes.substr(0, cut));
    forged.control.reset();
    forged.data.reset();
    const size_t whole = cut < 13 ? 0 : cut < 21 ? 1 : cut < 99 ? 2 : 3;
    for (size_t i = 0; i < whole; ++i) EXPECT(buffers.arrived(i));
    for (size_t i = whole; i < sizes.size(); ++i) EXPECT_EQ(finish(buffers.request(i)), kRemoteError);
  }
}

// The kernel takes a part of a batch; the rest goes when the receiver makes room.
TEST(a_batch_that_does_not_fit_goes_on) {
  Pair pair = connected();
  constexpr size_t kSize = 3000;
  std::vector<std::vector<uint8_t>> data(kMaxRequests);
  std::vector<void*> sending(kMaxRequests, nullptr);
  size_t sent = 0;
  for (int idle = 0; idle < 1000; ++idle) {  // until nothing has gone for long
    for (size_t i = 0; i < kMaxRequests; ++i) {
      int done = sending[i] == nullptr ? 1 : 0;
      if (done == 0) CHECK_EQ(net().test(sending[i], &done, nullptr), kSuccess);
      if (done == 0) continue;
      data[i] = pattern(kSize, sent++);
      sending[i] = send(pair, data[i].data(), kSize);
      idle = 0;
    }
  }
  CHECK(sent > 2 * kMaxRequests);
  for (size_t i = 0; i < sent; ++i) {
    const Buffers buffers(pair.receiver, {kSize}, i);
    for (void* request : sending) {
      int done = 0;
      if (request != nullptr) CHECK_EQ(net().test(request, &done, nullptr), kSuccess);
      if (done != 0) *std::find(sending.begin(), sending.end(), request) = nullptr;
    }
    CHECK(buffers.arrived(0));
  }
  EXPECT(std::all_of(sending.begin(), sending.end(), [](void* request) { return request == nullptr; }));
  close(&pair);
}

}  // namespace
}  // namespace bagua::nccl_net::rig
