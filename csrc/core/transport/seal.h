// The two directions of one encrypted connection: records, each sealed by an authenticated cipher of libcrypto.
//
// Not thread-safe: each belongs to the thread that moves its stream.
//
// The nonce of a record is its number on this key, counted from 0 on both sides and never sent: a record that was
// changed, repeated, left out, moved, cut or taken from another connection or direction does not open. Keys belong to
// one direction of one connection, so that no pair of key and nonce is used twice. After kBytesPerKey bytes both sides
// go on with a new key, derived from the one before (RFC 8446, 5.5, says how much one key may carry).
//
// A record is begin(), update() for each piece of it, whatever their lengths, and end(). What Opener::update() gives
// out is to be believed only once end() has said so.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/sha256.h"
#include "base/status.h"
#include "transport/libcrypto.h"

namespace bagua {

enum class Cipher : uint32_t { kAes256Gcm = 1, kChaCha20Poly1305 = 2 };

const char* cipher_name(Cipher cipher);
// Whether this processor has instructions for AES-GCM; without, ChaCha20 is faster and as safe.
bool has_aes_instructions();

class RecordKeys {
 public:
  static constexpr size_t kTagBytes = 16;
  static constexpr uint64_t kBytesPerKey = uint64_t{1} << 35;

  RecordKeys() = default;
  ~RecordKeys();
  RecordKeys(const RecordKeys&) = delete;
  RecordKeys& operator=(const RecordKeys&) = delete;

 protected:
  Status open(Libcrypto::Init Libcrypto::* init, Cipher cipher, const Digest& secret, uint64_t bytes_per_key);
  bool next_record();
  void count(size_t bytes) { used_ += bytes; }

  const Libcrypto* crypto_ = nullptr;
  EvpCipherContext* context_ = nullptr;

 private:
  bool set_key();

  Libcrypto::Init init_ = nullptr;
  uint64_t bytes_per_key_ = 0;
  Digest secret_{};  // of the keys that follow the present one
  std::array<uint8_t, 12> iv_{};
  uint64_t record_ = 0;  // the number of the next one
  uint64_t used_ = 0;    // bytes since the key is in use
};

// Calls that return false mean that libcrypto failed, which it has no reason to.
class Sealer : RecordKeys {
 public:
  using RecordKeys::kBytesPerKey;
  using RecordKeys::kTagBytes;
  // `secret` is what the other side's Opener gets, too. kResource: there is no such cipher here.
  Status open(Cipher cipher, const Digest& secret, uint64_t bytes_per_key = kBytesPerKey) {
    return RecordKeys::open(&Libcrypto::encrypt_init, cipher, secret, bytes_per_key);
  }
  bool begin() { return next_record(); }
  bool update(const void* in, void* out, size_t bytes);
  bool end(void* tag);
};

class Opener : RecordKeys {
 public:
  using RecordKeys::kBytesPerKey;
  using RecordKeys::kTagBytes;
  Status open(Cipher cipher, const Digest& secret, uint64_t bytes_per_key = kBytesPerKey) {
    return RecordKeys::open(&Libcrypto::decrypt_init, cipher, secret, bytes_per_key);
  }
  bool begin() { return next_record(); }
  bool update(const void* in, void* out, size_t bytes);  // in == out is allowed
  // True: all pieces of the record are what its sealer was given.
  bool end(const void* tag);
};

// Both null: the connection is plain.
struct Seals {
  std::unique_ptr<Sealer> out;
  std::unique_ptr<Opener> in;
};

}  // namespace bagua
