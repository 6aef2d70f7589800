// SHA-256 (FIPS 180-4), HMAC-SHA-256 (RFC 2104) and HKDF-SHA-256 (RFC 5869) for handshakes and keys. Not optimised,
// because the inputs are short.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace bagua {

using Digest = std::array<uint8_t, 32>;

// Hashes one message: call update() any number of times, then finish() once.
class Sha256 {
 public:
  Sha256();
  void update(const void* data, size_t n);
  Digest finish();

 private:
  void compress(const uint8_t* block);

  std::array<uint32_t, 8> state_;
  std::array<uint8_t, 64> pending_{};
  uint64_t length_ = 0;  // bytes so far
};

// HMAC of one message, which is the concatenation of all inputs of update().
class HmacSha256 {
 public:
  HmacSha256(const void* key, size_t n);
  void update(const void* data, size_t n) { inner_.update(data, n); }
  Digest finish();

 private:
  Sha256 inner_;
  std::array<uint8_t, 64> outer_pad_;
};

Digest sha256(const void* data, size_t n);
Digest hmac_sha256(const void* key, size_t key_bytes, const void* data, size_t n);
// Derives keys from `key`, which is HMAC(salt, secret) where the secret is not uniformly random: HKDF's first step.
// `bytes` is at most 255 * sizeof(Digest).
void hkdf_expand(const Digest& key, const std::string& info, void* out, size_t bytes);

// Compares `n` bytes in a time that does not depend on where they differ.
bool equal_constant_time(const void* a, const void* b, size_t n);

}  // namespace bagua
