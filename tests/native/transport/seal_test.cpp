// Records, keys and the exchange of keys: values that other programs computed, and every way in which a record is not
// the one that was due.
#include "transport/seal.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

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

std::string unhex(const std::string& text) {
  std::string bytes;
  for (size_t i = 0; i < text.size(); i += 2) bytes += static_cast<char>(std::stoi(text.substr(i, 2), nullptr, 16));
  return bytes;
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

// By the Python package `cryptography`: two records on the first key, two on the next.
TEST(known_values) {
  const struct {
    Cipher cipher;
    const char* records[4];
  } cases[] = {
      {Cipher::kAes256Gcm,
       {"4a77f937eae3ce0cfbf097ef4ad2fa1761a53711c2048d2624165340c44dae9098d9fd094739c3726fe579678571272294a84c01303bcb"
        "37"
        "b4",
        "85e55919caa29c5c3bd9c6e6f150ea30294eb7e74affb3f947cf8df7d2c70a410af3089f96e805a43c86b762f02deccffe422058f0d2c2"
        "50"
        "2e",
        "37b1415cafef004ad458066cb9aae35588f55cd2323c58abfc188769c206a1d57da5eba18f447100a67747b683a352c6348ec6792d711f"
        "b5"
        "3b",
        "40c594b6774c80c0446695e29a0086b6ae652a0f6eceb7cb59db3b86dcc48f6f679dd52ef39dea5e8d7895befd707dd8b0d772eb665e38"
        "69"
        "32"}},
      {Cipher::kChaCha20Poly1305,
       {"521a7f43207f4f99fa6f071b47e6a9bb2c1b00ddc5b6b2547e087069265c2f21d032e627f293489e837b39d0aa4af1526ad090005fdb8c"
        "43"
        "0d",
        "ad0c16dbdc19b846b2e0fa1288fce66f76d8b1e778850b90cfa9be37e607de48db31057216ec3be9e59ca8e15beba5e61d70f51a9c238f"
        "21"
        "b0",
        "511678f1f9c0c4db8c6fea71f54310ea559c4c9a3968a1feed2ca4b438d37fbdec25788879472c4d0039b802be60e27e19f01caacf43f8"
        "bf"
        "ed",
        "a004e49f0c9de9b5340b1076a6d8a735a02c0140d452277a32a0c96dda3667295b926615d4cda16950e616085917bb9efa566d5a49f107"
        "65"
        "33"}},
  };
  for (const auto& one : cases) {
    Ends ends(one.cipher, 2 * kText.size());
    for (const char* record : one.records) {
      EXPECT_EQ(hex(seal(&ends.sealer, kText, 7)), record);
      std::string text;
      EXPECT(open(&ends.opener, unhex(record), &text, 9));
      EXPECT_EQ(text, kText);
    }
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
