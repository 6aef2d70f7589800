// Checksums, digests, descriptors, text.
#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "base/clock.h"
#include "base/crc32c.h"
#include "base/fd.h"
#include "base/random.h"
#include "base/sha256.h"
#include "base/text.h"
#include "harness.h"

namespace bagua {
namespace {

template <class Bytes>
std::string hex(const Bytes& bytes) {
  std::string text;
  for (const uint8_t byte : bytes) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

std::vector<uint8_t> random_bytes(size_t n, unsigned seed) {
  std::mt19937 generator(seed);
  std::vector<uint8_t> bytes(n);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(generator());
  return bytes;
}

TEST(crc32c_known_values) {
  // RFC 3720, B.4.
  std::vector<uint8_t> bytes(32, 0);
  EXPECT_EQ(crc32c(bytes.data(), 32), 0x8a9136aau);
  std::fill(bytes.begin(), bytes.end(), 0xff);
  EXPECT_EQ(crc32c(bytes.data(), 32), 0x62a8ab43u);
  for (size_t i = 0; i < 32; ++i) bytes[i] = static_cast<uint8_t>(i);
  EXPECT_EQ(crc32c(bytes.data(), 32), 0x46dd794eu);
  EXPECT_EQ(crc32c("123456789", 9), 0xe3069283u);
  EXPECT_EQ(crc32c_portable("123456789", 9), 0xe3069283u);
  EXPECT_EQ(crc32c(nullptr, 0), 0u);
}

TEST(crc32c_hardware_and_tables_agree) {
  const std::vector<uint8_t> bytes = random_bytes(100'000, 1);
  for (const size_t size : {0,    1,    7,    8,    9,    63,   383,   384,   385,   1023,   1024,
                            1025, 1279, 1280, 3071, 3072, 3073, 24575, 24576, 24577, 50'000, 99'990}) {
    for (const size_t offset : {0, 1, 3, 8}) {
      EXPECT_EQ(crc32c(bytes.data() + offset, size), crc32c_portable(bytes.data() + offset, size));
    }
  }
}

TEST(crc32c_continues) {
  const std::vector<uint8_t> bytes = random_bytes(70'000, 2);
  const uint32_t whole = crc32c(bytes.data(), bytes.size());
  for (const size_t cut : {1, 100, 4096, 33'333, 69'999}) {
    EXPECT_EQ(crc32c(bytes.data() + cut, bytes.size() - cut, crc32c(bytes.data(), cut)), whole);
  }
}

TEST(sha256_known_values) {
  EXPECT_EQ(hex(sha256("", 0)), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(hex(sha256("abc", 3)), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  const char* two_blocks = "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq";
  EXPECT_EQ(hex(sha256(two_blocks, 56)), "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  Sha256 hash;
  const std::string thousand(1000, 'a');
  for (int i = 0; i < 1000; ++i) hash.update(thousand.data(), thousand.size());
  EXPECT_EQ(hex(hash.finish()), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(sha256_in_pieces) {
  const std::vector<uint8_t> bytes = random_bytes(300, 3);
  for (size_t size = 0; size <= bytes.size(); ++size) {
    Sha256 hash;
    for (size_t i = 0; i < size; i += 7) hash.update(bytes.data() + i, std::min<size_t>(7, size - i));
    EXPECT(hash.finish() == sha256(bytes.data(), size));
  }
}

TEST(hmac_sha256_known_values) {
  // RFC 4231, cases 1, 2, 3 and 6.
  const std::vector<uint8_t> key1(20, 0x0b);
  EXPECT_EQ(hex(hmac_sha256(key1.data(), key1.size(), "Hi There", 8)),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(hex(hmac_sha256("Jefe", 4, "what do ya want for nothing?", 28)),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  const std::vector<uint8_t> key3(20, 0xaa);
  const std::vector<uint8_t> data3(50, 0xdd);
  EXPECT_EQ(hex(hmac_sha256(key3.data(), key3.size(), data3.data(), data3.size())),
            "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  const std::vector<uint8_t> key6(131, 0xaa);
  const char* data6 = "Test Using Larger Than Block-Size Key - Hash Key First";
  EXPECT_EQ(hex(hmac_sha256(key6.data(), key6.size(), data6, std::strlen(data6))),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

TEST(hkdf_known_values) {
  // RFC 5869, A.1, A.2, A.3.
  const auto from_to = [](int first, int last) {
    std::string bytes;
    for (int value = first; value <= last; ++value) bytes += static_cast<char>(value);
    return bytes;
  };
  const auto expanded = [](const Digest& key, const std::string& info, size_t n) {
    std::vector<uint8_t> out(n);
    hkdf_expand(key, info, out.data(), n);
    return hex(out);
  };
  const std::string ikm1(22, '\x0b'), salt1 = from_to(0, 12);
  const Digest prk1 = hmac_sha256(salt1.data(), salt1.size(), ikm1.data(), ikm1.size());
  EXPECT_EQ(hex(prk1), "077709362c2e32df0ddc3f0dc47bba6390b6c73bb50f9c3122ec844ad7c2b3e5");
  EXPECT_EQ(expanded(prk1, from_to(0xf0, 0xf9), 42),
            "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865");
  const std::string ikm2 = from_to(0, 0x4f), salt2 = from_to(0x60, 0xaf);
  const Digest prk2 = hmac_sha256(salt2.data(), salt2.size(), ikm2.data(), ikm2.size());
  EXPECT_EQ(
      expanded(prk2, from_to(0xb0, 0xff), 82),
      "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c59045a99cac7827271cb41c65e590e09da3275600c2f0"
      "9b8367793a9aca3db71cc30c58179ec3e87c14c01d5c1f3434f1d87");
  const Digest prk3 = hmac_sha256("", 0, ikm1.data(), ikm1.size());
  EXPECT_EQ(expanded(prk3, "", 42),
            "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8");
}

}  // namespace
}  // namespace bagua
