#include "base/hkdf.h"

#include <algorithm>
#include <cstring>

namespace bagua {

Digest hkdf_extract(const void* salt, size_t salt_bytes, const void* secret, size_t secret_bytes) {
  return hmac_sha256(salt, salt_bytes, secret, secret_bytes);
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

}  // namespace bagua
