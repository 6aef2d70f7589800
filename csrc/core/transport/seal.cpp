#include "transport/seal.h"

#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include <cstring>
#include <string>

#include "base/sha256.h"

namespace bagua {
namespace {

uint8_t* bytes_of(void* data) {
  return static_cast<uint8_t*>(data);
}
const uint8_t* bytes_of(const void* data) {
  return static_cast<const uint8_t*>(data);
}

}  // namespace

const char* cipher_name(Cipher cipher) {
  return cipher == Cipher::kAes256Gcm ? "AES-256-GCM" : "ChaCha20-Poly1305";
}

bool has_aes_instructions() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("aes") && __builtin_cpu_supports("pclmul");
#elif defined(__aarch64__)
  const unsigned long wanted = HWCAP_AES | HWCAP_PMULL;
  return (getauxval(AT_HWCAP) & wanted) == wanted;
#else
  return false;
#endif
}

RecordKeys::~RecordKeys() {
  if (context_ != nullptr) crypto_->cipher_free(context_);  // wipes its key
  explicit_bzero(secret_.data(), secret_.size());
  explicit_bzero(iv_.data(), iv_.size());
}

Status RecordKeys::open(Libcrypto::Init Libcrypto::* init, Cipher cipher, const Digest& secret,
                        uint64_t bytes_per_key) {
  if (Status status = libcrypto(&crypto_); !status) return status;
  init_ = crypto_->*init;
  secret_ = secret;
  bytes_per_key_ = bytes_per_key;
  context_ = crypto_->cipher_new();
  const EvpCipher* const wanted = cipher == Cipher::kAes256Gcm ? crypto_->aes_256_gcm() : crypto_->chacha20_poly1305();
  if (context_ != nullptr && wanted != nullptr && init_(context_, wanted, nullptr, nullptr, nullptr) == 1 &&
      set_key()) {
    return Status::ok();
  }
  return {Code::kResource, std::string(crypto_->version_text(0)) + " offers no " + cipher_name(cipher) +
                               ", which connections to other hosts need"};
}

bool RecordKeys::set_key() {
  std::array<uint8_t, 32> key;
  hkdf_expand(secret_, "key", key.data(), key.size());
  hkdf_expand(secret_, "iv", iv_.data(), iv_.size());
  const bool set = init_(context_, nullptr, nullptr, key.data(), nullptr) == 1;
  hkdf_expand(secret_, "next", key.data(), key.size());
  secret_ = key;
  explicit_bzero(key.data(), key.size());
  record_ = used_ = 0;
  return set;
}

// Sets the nonce of the next record: the nonce of this direction XOR the record's number, which is big-endian.
bool RecordKeys::next_record() {
  if (used_ >= bytes_per_key_ && !set_key()) return false;
  std::array<uint8_t, 12> nonce = iv_;
  for (size_t i = 0; i < 8; ++i) nonce[11 - i] ^= static_cast<uint8_t>(record_ >> (8 * i));
  ++record_;
  return init_(context_, nullptr, nullptr, nullptr, nonce.data()) == 1;
}

bool Sealer::update(const void* in, void* out, size_t bytes) {
  int written = 0;
  count(bytes);
  return crypto_->encrypt_update(context_, bytes_of(out), &written, bytes_of(in), static_cast<int>(bytes)) == 1;
}

bool Sealer::end(void* tag) {
  int written = 0;
  uint8_t none[32];
  return crypto_->encrypt_final(context_, none, &written) == 1 &&
         crypto_->cipher_control(context_, Libcrypto::kGetTag, kTagBytes, tag) == 1;
}

bool Opener::update(const void* in, void* out, size_t bytes) {
  int written = 0;
  count(bytes);
  return crypto_->decrypt_update(context_, bytes_of(out), &written, bytes_of(in), static_cast<int>(bytes)) == 1;
}

bool Opener::end(const void* tag) {
  int written = 0;
  uint8_t none[32];
  uint8_t expected[kTagBytes];  // not const, because OpenSSL's interface takes a writable pointer
  std::memcpy(expected, tag, sizeof expected);
  return crypto_->cipher_control(context_, Libcrypto::kSetTag, kTagBytes, expected) == 1 &&
         crypto_->decrypt_final(context_, none, &written) == 1;
}

}  // namespace bagua
