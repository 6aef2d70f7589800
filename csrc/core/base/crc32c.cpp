#include "base/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace bagua {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78;  // bits reversed

// Product of two polynomials modulo the CRC polynomial, bits reversed (the highest bit is x^0).
constexpr uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (int bit = 31; bit >= 0; --bit) {
    if ((a >> bit & 1) != 0) product ^= b;
    b = (b & 1) != 0 ? (b >> 1) ^ kPolynomial : b >> 1;
  }
  return product;
}

// Tables for byte-wise CRC of eight bytes at a time: tables[k][b] is the CRC of byte b followed by k zero bytes.
constexpr std::array<std::array<uint32_t, 256>, 8> make_slices() {
  std::array<std::array<uint32_t, 256>, 8> tables{};
  for (uint32_t b = 0; b < 256; ++b) {
    uint32_t crc = b;
    for (int i = 0; i < 8; ++i) crc = (crc & 1) != 0 ? (crc >> 1) ^ kPolynomial : crc >> 1;
    tables[0][b] = crc;
  }
  for (size_t k = 1; k < 8; ++k) {
    for (size_t b = 0; b < 256; ++b) tables[k][b] = (tables[k - 1][b] >> 8) ^ tables[0][tables[k - 1][b] & 0xff];
  }
  return tables;
}

constexpr auto kSlices = make_slices();

uint32_t update_portable(uint32_t crc, const uint8_t* at, size_t n) {
  while (n >= 8) {
    uint64_t word;
    std::memcpy(&word, at, 8);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    word ^= crc;
    crc = 0;
    for (int k = 0; k < 8; ++k) crc ^= kSlices[static_cast<size_t>(7 - k)][word >> (8 * k) & 0xff];
    at += 8;
    n -= 8;
  }
  for (; n > 0; --n) crc = (crc >> 8) ^ kSlices[0][(crc ^ *at++) & 0xff];
  return crc;
}

#if defined(__x86_64__)

// Appends 2^kLog2 zero bytes to a CRC: multiplication by x^(8 * 2^kLog2), by tables of its four bytes.
template <int kLog2>
struct Shift {
  static constexpr size_t kBytes = size_t{1} << kLog2;
  static constexpr std::array<std::array<uint32_t, 256>, 4> make() {
    uint32_t power = 1u << 30;  // x
    for (int i = 0; i < kLog2 + 3; ++i) power = multiply(power, power);
    std::array<std::array<uint32_t, 256>, 4> tables{};
    for (uint32_t k = 0; k < 4; ++k) {
      // The map is linear: entries follow from those of single bits.
      for (uint32_t bit = 0; bit < 8; ++bit) {
        const uint32_t value = multiply(power, 1u << (8 * k + bit));
        for (uint32_t low = 0; low < (1u << bit); ++low) tables[k][(1u << bit) | low] = value ^ tables[k][low];
      }
    }
    return tables;
  }
  static constexpr std::array<std::array<uint32_t, 256>, 4> kTables = make();
  static uint32_t apply(uint32_t crc) {
    return kTables[0][crc & 0xff] ^ kTables[1][crc >> 8 & 0xff] ^ kTables[2][crc >> 16 & 0xff] ^ kTables[3][crc >> 24];
  }
};

inline uint64_t load64(const uint8_t* at) {
  uint64_t word;
  std::memcpy(&word, at, 8);
  return word;
}

// The CRC instruction takes three cycles, and a new one can start in each cycle. So three independent streams are
// computed at once and joined at the end.
template <int kLog2>
__attribute__((target("sse4.2"))) void update_three(uint64_t* crc, const uint8_t** at, size_t* n) {
  using Lane = Shift<kLog2>;
  while (*n >= 3 * Lane::kBytes) {
    uint64_t a = *crc;
    uint64_t b = 0;
    uint64_t c = 0;
    const uint8_t* p = *at;
    for (const uint8_t* end = p + Lane::kBytes; p < end; p += 16) {
      a = _mm_crc32_u64(a, load64(p));
      b = _mm_crc32_u64(b, load64(p + Lane::kBytes));
      c = _mm_crc32_u64(c, load64(p + 2 * Lane::kBytes));
      a = _mm_crc32_u64(a, load64(p + 8));
      b = _mm_crc32_u64(b, load64(p + 8 + Lane::kBytes));
      c = _mm_crc32_u64(c, load64(p + 8 + 2 * Lane::kBytes));
    }
    a = Lane::apply(static_cast<uint32_t>(a)) ^ b;
    *crc = Lane::apply(static_cast<uint32_t>(a)) ^ c;
    *at += 3 * Lane::kBytes;
    *n -= 3 * Lane::kBytes;
  }
}

__attribute__((target("sse4.2"))) uint32_t update_sse42(uint32_t start, const uint8_t* at, size_t n) {
  uint64_t crc = start;
  update_three<13>(&crc, &at, &n);
  update_three<10>(&crc, &at, &n);
  update_three<7>(&crc, &at, &n);
  for (; n >= 8; at += 8, n -= 8) crc = _mm_crc32_u64(crc, load64(at));
  auto last = static_cast<uint32_t>(crc);
  for (; n > 0; --n) last = _mm_crc32_u8(last, *at++);
  return last;
}

// x^n modulo the polynomial, as a factor of the carry-less multiplication of bit-reversed values (hence the shift).
constexpr uint64_t fold_factor(uint32_t n) {
  uint32_t result = 1u << 31, square = 1u << 30;  // 1, x
  for (; n > 0; n >>= 1) {
    if ((n & 1) != 0) result = multiply(result, square);
    square = multiply(square, square);
  }
  return uint64_t{result} << 1;
}

// Folds 256 bytes at a time: the data read so far is represented by 256 bytes with the same remainder, which are folded
// onto the next 256 (V. Gopal et al., Fast CRC Computation for Generic Polynomials Using PCLMULQDQ, Intel 2009). On
// data in the cache it is about twice as fast as the CRC instruction.
__attribute__((target("avx512f,avx512dq,vpclmulqdq,sse4.2"))) uint32_t update_folding(uint32_t start, const uint8_t* at,
                                                                                      size_t n) {
  constexpr size_t kBlock = 256;
  if (n < 4 * kBlock) return update_sse42(start, at, n);
  constexpr auto kLow = static_cast<int64_t>(fold_factor(8 * kBlock + 32));
  constexpr auto kHigh = static_cast<int64_t>(fold_factor(8 * kBlock - 32));
  const __m512i factors = _mm512_set4_epi64(kHigh, kLow, kHigh, kLow);
  __m512i folded[4];
  for (size_t i = 0; i < 4; ++i) folded[i] = _mm512_loadu_si512(at + 64 * i);
  folded[0] = _mm512_xor_si512(folded[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(start))));
  for (at += kBlock, n -= kBlock; n >= kBlock; at += kBlock, n -= kBlock) {
    for (size_t i = 0; i < 4; ++i) {
      const __m512i low = _mm512_clmulepi64_epi128(folded[i], factors, 0x00);
      const __m512i high = _mm512_clmulepi64_epi128(folded[i], factors, 0x11);
      folded[i] = _mm512_ternarylogic_epi64(low, high, _mm512_loadu_si512(at + 64 * i), 0x96);  // XOR of the three
    }
  }
  alignas(64) uint8_t last[kBlock];
  for (size_t i = 0; i < 4; ++i) _mm512_store_si512(last + 64 * i, folded[i]);
  return update_sse42(update_sse42(0, last, kBlock), at, n);
}

using Update = uint32_t (*)(uint32_t, const uint8_t*, size_t);

Update best_update() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("sse4.2")) return update_portable;
  const bool folds =
      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("vpclmulqdq");
  return folds ? update_folding : update_sse42;
}

const Update kUpdate = best_update();

#else
constexpr auto kUpdate = update_portable;
#endif

}  // namespace

uint32_t crc32c(const void* data, size_t n, uint32_t seed) {
  return ~kUpdate(~seed, static_cast<const uint8_t*>(data), n);
}

uint32_t crc32c_portable(const void* data, size_t n, uint32_t seed) {
  return ~update_portable(~seed, static_cast<const uint8_t*>(data), n);
}

}  // namespace bagua
