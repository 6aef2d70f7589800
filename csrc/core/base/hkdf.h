// HKDF-SHA-256 (RFC 5869): derives keys from a secret that is not uniformly random, or from another key.
#pragma once

#include <cstddef>
#include <string>

#include "base/sha256.h"

namespace bagua {

Digest hkdf_extract(const void* salt, size_t salt_bytes, const void* secret, size_t secret_bytes);
// `bytes` is at most 255 * sizeof(Digest).
void hkdf_expand(const Digest& key, const std::string& info, void* out, size_t bytes);

}  // namespace bagua
