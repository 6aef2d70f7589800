#include "base/sha256.h"

#include <algorithm>
#include <cstring>

namespace bagua {
namespace {

constexpr std::array<uint32_t, 64> kRound = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

constexpr uint32_t rotate(uint32_t x, int by) {
  return x >> by | x << (32 - by);
}

uint32_t load_be(const uint8_t* at) {
  return uint32_t{at[0]} << 24 | uint32_t{at[1]} << 16 | uint32_t{at[2]} << 8 | uint32_t{at[3]};
}

void store_be(uint8_t* at, uint32_t value) {
  for (int i = 0; i < 4; ++i) at[i] = static_cast<uint8_t>(value >> (24 - 8 * i));
}

}  // namespace

Sha256::Sha256()
    : state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19} {}

void Sha256::compress(const uint8_t* block) {
  std::array<uint32_t, 64> w;
  for (size_t i = 0; i < 16; ++i) w[i] = load_be(block + 4 * i);
  for (size_t i = 16; i < 64; ++i) {
    const uint32_t s0 = rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ (w[i - 15] >> 3);
    const uint32_t s1 = rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ (w[i - 2] >> 10);
    w[i] = w[i - 16] + s0 + w[i - 7] + s1;
  }
  auto [a, b, c, d, e, f, g, h] = state_;
  for (size_t i = 0; i < 64; ++i) {
    const uint32_t s1 = rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25);
    const uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + kRound[i] + w[i];
    const uint32_t s0 = rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22);
    const uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
    h = g;
    g = f;
    f = e;
    e = d + t1;
    d = c;
    c = b;
    b = a;
    a = t1 + t2;
  }
  const std::array<uint32_t, 8> add = {a, b, c, d, e, f, g, h};
  for (size_t i = 0; i < 8; ++i) state_[i] += add[i];
}

void Sha256::update(const void* data, size_t n) {
  const uint8_t* at = static_cast<const uint8_t*>(data);
  size_t filled = length_ % 64;
  length_ += n;
  while (n > 0) {
    const size_t take = std::min(n, 64 - filled);
    std::memcpy(pending_.data() + filled, at, take);
    at += take;
    n -= take;
    filled += take;
    if (filled == 64) {
      compress(pending_.data());
      filled = 0;
    }
  }
}

Digest Sha256::finish() {
  const uint64_t bits = length_ * 8;
  const uint8_t end = 0x80;
  const std::array<uint8_t, 64> zeros{};
  update(&end, 1);
  const size_t filled = length_ % 64;
  update(zeros.data(), filled <= 56 ? 56 - filled : 120 - filled);
  std::array<uint8_t, 8> length;
  store_be(length.data(), static_cast<uint32_t>(bits >> 32));
  store_be(length.data() + 4, static_cast<uint32_t>(bits));
  update(length.data(), length.size());
  Digest digest;
  for (size_t i = 0; i < 8; ++i) store_be(digest.data() + 4 * i, state_[i]);
  return digest;
}

HmacSha256::HmacSha256(const void* key, size_t n) {
  std::array<uint8_t, 64> block{};
  if (n > block.size()) {
    const Digest digest = sha256(key, n);
    std::memcpy(block.data(), digest.data(), digest.size());
  } else if (n > 0) {
    std::memcpy(block.data(), key, n);
  }
  std::array<uint8_t, 64> inner_pad;
  for (size_t i = 0; i < block.size(); ++i) {
    inner_pad[i] = block[i] ^ 0x36;
    outer_pad_[i] = block[i] ^ 0x5c;
  }
  inner_.update(inner_pad.data(), inner_pad.size());
}

Digest HmacSha256::finish() {
  const Digest inner = inner_.finish();
  Sha256 outer;
  outer.update(outer_pad_.data(), outer_pad_.size());
  outer.update(inner.data(), inner.size());
  return outer.finish();
}

Digest sha256(const void* data, size_t n) {
  Sha256 hash;
  hash.update(data, n);
  return hash.finish();
}

Digest hmac_sha256(const void* key, size_t key_bytes, const void* data, size_t n) {
  HmacSha256 mac(key, key_bytes);
  mac.update(data, n);
  return mac.finish();
}

void hkdf_expand(const Digest& key, const std::string& info, void* out, size_t bytes) {
  Digest block;
  char* at = static_cast<char*>(out);
  for (uint8_t number = 1; bytes > 0; ++number) {
    HmacSha256 mac(key.data(), key.size());
    if (number > 1) mac.update(block.data(), block.size());
    mac.update(info.data(), info.size());
    mac.update(&number, 1);
    block = mac.finish();
    const size_t take = std::min(bytes, block.size());
    std::memcpy(at, block.data(), take);
    at += take;
    bytes -= take;
  }
  explicit_bzero(block.data(), block.size());
}

bool equal_constant_time(const void* a, const void* b, size_t n) {
  const volatile uint8_t* x = static_cast<const volatile uint8_t*>(a);
  const volatile uint8_t* y = static_cast<const volatile uint8_t*>(b);
  uint8_t difference = 0;
  for (size_t i = 0; i < n; ++i) difference = static_cast<uint8_t>(difference | (x[i] ^ y[i]));
  return difference == 0;
}

}  // namespace bagua
