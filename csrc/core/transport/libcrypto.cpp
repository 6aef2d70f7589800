#include "transport/libcrypto.h"

#include <cstring>
#include <memory>
#include <mutex>

#include "base/library.h"
#include "base/random.h"

namespace bagua {
namespace {

constexpr const char* kVariable = "BAGUA_LIBCRYPTO";

Status missing(const std::string& why) {
  return {Code::kResource,
          "connections to other hosts are encrypted by OpenSSL's libcrypto (1.1.1 or 3), which can't be used here: " +
              why + ". Install it (Debian, Ubuntu: libssl3; Fedora, RHEL: openssl-libs), name its file in " +
              kVariable + ", or start the daemons of all hosts with --plain-data if their network is protected"};
}

void fill(LibraryTable* f, Libcrypto* t) {
  f->need(&t->version_text, {"OpenSSL_version"});
  f->need(&t->aes_256_gcm, {"EVP_aes_256_gcm"});
  f->need(&t->chacha20_poly1305, {"EVP_chacha20_poly1305"});
  f->need(&t->cipher_new, {"EVP_CIPHER_CTX_new"});
  f->need(&t->cipher_free, {"EVP_CIPHER_CTX_free"});
  f->need(&t->cipher_control, {"EVP_CIPHER_CTX_ctrl"});
  f->need(&t->encrypt_init, {"EVP_EncryptInit_ex"});
  f->need(&t->encrypt_update, {"EVP_EncryptUpdate"});
  f->need(&t->encrypt_final, {"EVP_EncryptFinal_ex"});
  f->need(&t->decrypt_init, {"EVP_DecryptInit_ex"});
  f->need(&t->decrypt_update, {"EVP_DecryptUpdate"});
  f->need(&t->decrypt_final, {"EVP_DecryptFinal_ex"});
  f->need(&t->private_key, {"EVP_PKEY_new_raw_private_key"});
  f->need(&t->public_key, {"EVP_PKEY_new_raw_public_key"});
  f->need(&t->get_public_key, {"EVP_PKEY_get_raw_public_key"});
  f->need(&t->key_free, {"EVP_PKEY_free"});
  f->need(&t->key_context_new, {"EVP_PKEY_CTX_new"});
  f->need(&t->key_context_free, {"EVP_PKEY_CTX_free"});
  f->need(&t->derive_init, {"EVP_PKEY_derive_init"});
  f->need(&t->derive_set_peer, {"EVP_PKEY_derive_set_peer"});
  f->need(&t->derive, {"EVP_PKEY_derive"});
}

struct Opened {
  Libcrypto functions{};
  Status status;

  Opened() {
    Library library;
    if (Status found = Library::open(kVariable, {"libcrypto.so.3", "libcrypto.so.1.1"}, &library); !found) {
      status = missing(found.message());
      return;
    }
    LibraryTable table(library);
    fill(&table, &functions);
    if (!table.missing().empty()) status = missing(library.path() + " has no " + table.missing());
  }
};

const Opened& opened() {
  static const Opened once;
  return once;
}

}  // namespace

Status libcrypto(const Libcrypto** out) {
  const Opened& library = opened();
  *out = &library.functions;
  return library.status;
}

KeyExchange::~KeyExchange() {
  if (key_ != nullptr) opened().functions.key_free(key_);
}

Status KeyExchange::open() {
  Bytes random;
  if (Status status = fill_random(random.data(), random.size()); !status) return status;
  Status status = open(random);
  explicit_bzero(random.data(), random.size());
  return status;
}

Status KeyExchange::open(const Bytes& private_key) {
  const Libcrypto* crypto = nullptr;
  if (Status status = libcrypto(&crypto); !status) return status;
  key_ = crypto->private_key(Libcrypto::kX25519, nullptr, private_key.data(), private_key.size());
  size_t count = public_.size();
  if (key_ != nullptr && crypto->get_public_key(key_, public_.data(), &count) == 1 && count == public_.size()) {
    return Status::ok();
  }
  return missing(std::string(crypto->version_text(0)) + " offers no X25519 (it may be set to FIPS mode)");
}

Status KeyExchange::agree(const Bytes& other_public, Digest* secret) const {
  const Libcrypto& crypto = opened().functions;
  const std::unique_ptr<EvpKey, void (*)(EvpKey*)> other(
      crypto.public_key(Libcrypto::kX25519, nullptr, other_public.data(), other_public.size()), crypto.key_free);
  const std::unique_ptr<EvpKeyContext, void (*)(EvpKeyContext*)> context(crypto.key_context_new(key_, nullptr),
                                                                         crypto.key_context_free);
  size_t count = secret->size();
  const bool agreed = other != nullptr && context != nullptr && crypto.derive_init(context.get()) == 1 &&
                      crypto.derive_set_peer(context.get(), other.get()) == 1 &&
                      crypto.derive(context.get(), secret->data(), &count) == 1 && count == secret->size();
  if (agreed) return Status::ok();
  return {Code::kCorrupt, "the other side's key for the exchange of keys is none"};
}

}  // namespace bagua
