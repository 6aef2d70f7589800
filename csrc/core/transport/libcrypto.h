// OpenSSL's libcrypto (1.1.1 or 3), which provides ciphers and the key exchange. It is opened at run time, by the first
// connection that needs it, so the functions that we use are declared here.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/sha256.h"
#include "base/status.h"

namespace bagua {

struct EvpCipher;         // EVP_CIPHER
struct EvpCipherContext;  // EVP_CIPHER_CTX
struct EvpKey;            // EVP_PKEY
struct EvpKeyContext;     // EVP_PKEY_CTX

struct Libcrypto {
  const char* (*version_text)(int);

  const EvpCipher* (*aes_256_gcm)();
  const EvpCipher* (*chacha20_poly1305)();
  EvpCipherContext* (*cipher_new)();
  void (*cipher_free)(EvpCipherContext*);
  int (*cipher_control)(EvpCipherContext*, int type, int argument, void* pointer);
  using Init = int (*)(EvpCipherContext*, const EvpCipher*, void* engine, const uint8_t* key, const uint8_t* iv);
  using Update = int (*)(EvpCipherContext*, uint8_t* out, int* out_bytes, const uint8_t* in, int bytes);
  using Final = int (*)(EvpCipherContext*, uint8_t* out, int* out_bytes);
  Init encrypt_init, decrypt_init;
  Update encrypt_update, decrypt_update;
  Final encrypt_final, decrypt_final;

  EvpKey* (*private_key)(int type, void* engine, const uint8_t* bytes, size_t count);
  EvpKey* (*public_key)(int type, void* engine, const uint8_t* bytes, size_t count);
  int (*get_public_key)(const EvpKey*, uint8_t* bytes, size_t* count);
  void (*key_free)(EvpKey*);
  EvpKeyContext* (*key_context_new)(EvpKey*, void* engine);
  void (*key_context_free)(EvpKeyContext*);
  int (*derive_init)(EvpKeyContext*);
  int (*derive_set_peer)(EvpKeyContext*, EvpKey*);
  int (*derive)(EvpKeyContext*, uint8_t* secret, size_t* count);

  static constexpr int kX25519 = 1034;                  // NID_X25519
  static constexpr int kGetTag = 0x10, kSetTag = 0x11;  // EVP_CTRL_AEAD_*
};

// Returns the library; the first call opens it. Any thread. kResource: there is no suitable library; the text says how
// to get one.
Status libcrypto(const Libcrypto** out);

// One side of an X25519 exchange (RFC 7748), for one connection.
class KeyExchange {
 public:
  using Bytes = std::array<uint8_t, 32>;

  KeyExchange() = default;
  ~KeyExchange();
  KeyExchange(const KeyExchange&) = delete;
  KeyExchange& operator=(const KeyExchange&) = delete;

  // Makes a private key from random bytes, or uses the one given.
  Status open();
  Status open(const Bytes& private_key);
  const Bytes& public_key() const { return public_; }  // zeros before open()
  // Computes the shared secret. kCorrupt: `other_public` is no valid key.
  Status agree(const Bytes& other_public, Digest* secret) const;

 private:
  EvpKey* key_ = nullptr;
  Bytes public_{};
};

}  // namespace bagua
