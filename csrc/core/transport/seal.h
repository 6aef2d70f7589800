// Seals and opens the records of an encrypted connection, one object per direction, by an authenticated cipher of
// libcrypto.
//
// Not thread-safe: each object belongs to the thread that drives its stream.
//
// The nonce of a record contains the record's number on this key. Both sides count from 0 and never send it. So a
// record that was changed, repeated, left out, reordered, cut, or taken from another connection or direction does not
// open. Keys belong to one direction of one connection, so no pair of key and nonce is used twice. After kBytesPerKey
// bytes both sides derive a new key from the last one (RFC 8446, 5.5, limits the bytes per key).
//
// To seal or open a record, call begin(), update() for each piece of any length, then end(). The output of
// Opener::update() must not be used before end() has returned true.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "base/fd.h"
#include "base/sha256.h"
#include "base/status.h"
#include "transport/libcrypto.h"

namespace bagua {

enum class Cipher : uint32_t { kAes256Gcm = 1, kChaCha20Poly1305 = 2 };

const char* cipher_name(Cipher cipher);
// True if this processor has instructions for AES-GCM. Without them ChaCha20 is faster and equally safe.
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
  Digest secret_{};  // from which the next keys are derived
  std::array<uint8_t, 12> iv_{};
  uint64_t record_ = 0;  // number of the next record
  uint64_t used_ = 0;    // bytes under the present key
};

// A return value of false means that libcrypto failed, which should not happen.
class Sealer : RecordKeys {
 public:
  using RecordKeys::kBytesPerKey;
  using RecordKeys::kTagBytes;
  // The other side's Opener uses the same `secret`. kResource: this libcrypto does not have the cipher.
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
  // True: the record is authentic, so that its pieces may be used.
  bool end(const void* tag);
};

// Both null: the connection is plain.
struct Seals {
  std::unique_ptr<Sealer> out;
  std::unique_ptr<Opener> in;
};

// A connection between two hosts after its handshake: the socket and, if it is encrypted, the ciphers.
struct Connection {
  Connection() = default;
  Connection(Fd plain) : socket(std::move(plain)) {}  // not explicit: a plain socket converts to a plain connection
  Connection(Fd connected, Seals agreed) : socket(std::move(connected)), seals(std::move(agreed)) {}

  bool encrypted() const { return seals.out != nullptr; }

  Fd socket;
  Seals seals;
};

}  // namespace bagua
