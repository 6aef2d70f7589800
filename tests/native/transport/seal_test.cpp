// Records, keys and the exchange of keys: values that other programs computed, and every way in which a record is not
// the one that was due.
#include "transport/seal.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "base/sha256.h"
#include "harness.h"

namespace bagua {
namespace {

const std::string kText = "forty bytes of a gradient, and a few more";

Digest counting() {
  Digest bytes;
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i);
  return bytes;
}

std::string hex(const std::string& bytes) {
  std::string text;
  for (const char byte : bytes) {
    text += "0123456789abcdef"[static_cast<uint8_t>(byte) >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

// A record with its tag, sealed in pieces of at most `piece` bytes.
std::string seal(Sealer* sealer, const std::string& text, size_t piece = SIZE_MAX) {
  std::string out(text.size() + Sealer::kTagBytes, '\0');
  CHECK(sealer->begin());
  for (size_t at = 0; at < text.size(); at += piece) {
    piece = std::min(piece, text.size() - at);
    CHECK(sealer->update(text.data() + at, out.data() + at, piece));
  }
  CHECK(sealer->end(out.data() + text.size()));
  return out;
}

bool open(Opener* opener, const std::string& record, std::string* text, size_t piece = SIZE_MAX) {
  const size_t bytes = record.size() - Opener::kTagBytes;
  *text = record.substr(0, bytes);
  CHECK(opener->begin());
  for (size_t at = 0; at < bytes; at += piece) {
    piece = std::min(piece, bytes - at);
    CHECK(opener->update(text->data() + at, text->data() + at, piece));  // in place
  }
  return opener->end(record.data() + bytes);
}

struct Ends {
  Sealer sealer;
  Opener opener;
  explicit Ends(Cipher cipher = Cipher::kAes256Gcm, uint64_t bytes_per_key = Sealer::kBytesPerKey) {
    CHECK_OK(sealer.open(cipher, counting(), bytes_per_key));
    CHECK_OK(opener.open(cipher, counting(), bytes_per_key));
  }
};

// Two records on the first key, two on the next: their digest, by the Python package `cryptography`.
TEST(known_values) {
  const std::pair<Cipher, const char*> cases[] = {
      {Cipher::kAes256Gcm, "289dd264d3de1ab3e2cabd34f4e39917935915aceaafcf3879f69f10d2bd6738"},
      {Cipher::kChaCha20Poly1305, "73a40df7a489878a054f0bb4d9ae94fa8a3530d13a3d2d212ba075725b520341"}};
  for (const auto& [cipher, digest] : cases) {
    Ends ends(cipher, 2 * kText.size());
    std::string all;
    for (int i = 0; i < 4; ++i) {
      const std::string record = seal(&ends.sealer, kText, 7);
      std::string text;
      EXPECT(open(&ends.opener, record, &text, 9));
      EXPECT_EQ(text, kText);
      all += record;
    }
    const Digest found = sha256(all.data(), all.size());
    EXPECT_EQ(hex(std::string(found.begin(), found.end())), digest);
  }
}

// By the Python package `cryptography`.
TEST(key_exchange_known_values) {
  const auto key_from = [](uint8_t first) {
    KeyExchange::Bytes key;
    for (size_t i = 0; i < key.size(); ++i) key[i] = static_cast<uint8_t>(first + i);
    return key;
  };
  const auto text = [](const auto& bytes) { return hex(std::string(bytes.begin(), bytes.end())); };
  KeyExchange one, other;
  CHECK_OK(one.open(key_from(0)));
  CHECK_OK(other.open(key_from(100)));
  EXPECT_EQ(text(one.public_key()), "8f40c5adb68f25624ae5b214ea767a6ec94d829d3d7b5e1ad1ba6f3e2138285f");
  EXPECT_EQ(text(other.public_key()), "7d9c24316539825c1896e57f28197746793ce60cbee3ad47da9d07b85fa55e2a");
  for (const auto& [mine, theirs] : {std::pair(&one, &other), std::pair(&other, &one)}) {
    Digest secret{};
    CHECK_OK(mine->agree(theirs->public_key(), &secret));
    EXPECT_EQ(text(secret), "3ae143fb898911b4591769dc17ca01775cc4cad4d05b8f33a39c79e30fa63a72");
  }
}

TEST(a_key_that_is_none) {
  KeyExchange mine;
  CHECK_OK(mine.open());
  Digest secret{};
  EXPECT(mine.agree(KeyExchange::Bytes{}, &secret).code() == Code::kCorrupt);
}

TEST(every_length_in_every_piece) {
  for (const Cipher cipher : {Cipher::kAes256Gcm, Cipher::kChaCha20Poly1305}) {
    Ends ends(cipher, 10'000);  // so that keys change
    for (const size_t bytes : {0, 1, 15, 16, 17, 63, 64, 65, 255, 4096, 5000}) {
      const std::string text(bytes, 'x');
      for (const size_t out : {SIZE_MAX, size_t{1}, size_t{100}}) {
        for (const size_t in : {SIZE_MAX, size_t{3}, size_t{64}}) {
          std::string opened;
          EXPECT(open(&ends.opener, seal(&ends.sealer, text, out), &opened, in));
          EXPECT_EQ(opened, text);
        }
      }
    }
  }
}

TEST(one_bit_is_enough) {
  for (const Cipher cipher : {Cipher::kAes256Gcm, Cipher::kChaCha20Poly1305}) {
    for (size_t bit = 0; bit < 8 * (kText.size() + Sealer::kTagBytes); ++bit) {
      Ends ends(cipher);
      std::string record = seal(&ends.sealer, kText), text;
      record[bit / 8] = static_cast<char>(record[bit / 8] ^ (1 << bit % 8));
      EXPECT(!open(&ends.opener, record, &text));
    }
  }
}

TEST(records_open_in_their_order_alone) {
  const auto due = [](size_t skip) {  // an opener that expects record `skip` now
    auto ends = std::make_unique<Ends>();
    std::string text;
    for (size_t i = 0; i < skip; ++i) CHECK(open(&ends->opener, seal(&ends->sealer, kText), &text));
    return ends;
  };
  for (size_t expected = 0; expected < 3; ++expected) {
    for (size_t came = 0; came < 3; ++came) {
      std::string text;
      EXPECT_EQ(open(&due(expected)->opener, seal(&due(came)->sealer, kText), &text), came == expected);
    }
  }
}

TEST(keys_change_at_both_ends_at_once) {
  Ends soon(Cipher::kAes256Gcm, 1), never;
  std::string text;
  const std::string first = seal(&soon.sealer, kText);
  EXPECT_EQ(first, seal(&never.sealer, kText));
  EXPECT(open(&soon.opener, first, &text));
  const std::string second = seal(&soon.sealer, kText);
  EXPECT(second != seal(&never.sealer, kText));
  EXPECT(second != first);  // with the same number, on another key
  EXPECT(open(&soon.opener, second, &text));
}

}  // namespace
}  // namespace bagua
