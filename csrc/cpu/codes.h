// Turning words of codes (quantized_weight.h) into what a product multiplies.
//
// Every code is a whole number below 256, so it is exact in bfloat16, and float all the more.

#pragma once

#include "blocks.h"
#include "integers.h"

namespace lora_serve::LORA_SERVE_PATH {

// kPerWord codes to a word of 32 bits; bytes(w, i) are four of them as the bytes that dot takes, too
// large by kOffset each: those of k = 4 i ... in byte order.
struct EightBits {
  static constexpr int kPerWord = 4, kOffset = kBytesRaisedBy;
  SIMD_INLINE U32x16 bytes(U32x16 w, int) { return raised_bytes(w); }
  SIMD_INLINE I32x16 dot(U32x16 bytes, U32x16 x, I32x16 acc) { return dot_bytes(bytes, x, acc); }
  SIMD_INLINE F32x16 in_byte_order(F32x16 x) { return x; }
  SIMD_INLINE F32x16 value(U32x16 w, int k) { return signed_byte(w, k); }
};

struct FourBits {
  static constexpr int kPerWord = 8, kOffset = 8;
  SIMD_INLINE U32x16 bytes(U32x16 w, int i) { return mask_words(shift_right(w, 4 * i), 0x0f0f0f0fu); }
  SIMD_INLINE I32x16 dot(U32x16 bytes, U32x16 x, I32x16 acc) {
    return dot_small_bytes(bytes, x, acc);
  }
  SIMD_INLINE F32x16 in_byte_order(F32x16 x) { return interleave_fours(x); }
  SIMD_INLINE F32x16 value(U32x16 w, int k) { return centred_nibble(w, k % 2 * 4 + k / 2); }
};

// The words that a word of codes becomes: kWords of them, ascending along k. Each is made when it is
// asked for, so that it need not wait in a register for its turn.
template <class Codes, class Word>
struct Decoded;

template <class Codes>
struct Decoded<Codes, float> {
  static constexpr int kWords = Codes::kPerWord;
  U32x16 codes;

  SIMD_INLINE Decoded of(U32x16 w) { return {w}; }
  SIMD_INLINE U32x16 word(const Decoded& decoded, int k) {
    return words_of(Codes::value(decoded.codes, k));
  }
};

#ifdef __AVX512BF16__

// bfloat16 of a magnitude below 128, as its high and its low byte. Of m in [2^e, 2^(e+1)) these are
// the bits of (127 + e) << 7 | (m << (7 - e) & 127).
struct MagnitudeTables {
  alignas(64) uint8_t high[128], low[128];
};

static constexpr MagnitudeTables magnitude_tables() {
  MagnitudeTables tables{};
  for (int m = 1; m < 128; ++m) {
    int e = 6;
    while (m >> e == 0) --e;
    const int bits = (127 + e) << 7 | ((m << (7 - e)) & 127);
    tables.high[m] = static_cast<uint8_t>(bits >> 8);
    tables.low[m] = static_cast<uint8_t>(bits & 255);
  }
  return tables;
}

static constexpr MagnitudeTables kMagnitudes = magnitude_tables();

// Bytes 2 i and 2 i + 1 of every word, from a register of low bytes and one of high bytes.
struct PairOrders {
  alignas(64) uint8_t bytes[2][64];
};

static constexpr PairOrders pair_orders() {
  PairOrders orders{};
  for (int i = 0; i < 2; ++i) {
    for (int at = 0; at < 64; ++at) {
      const int byte = at / 4 * 4 + 2 * i + at % 4 / 2;
      orders.bytes[i][at] = static_cast<uint8_t>(at % 2 == 0 ? byte : 64 + byte);
    }
  }
  return orders;
}

static constexpr PairOrders kPairOrders = pair_orders();

#ifdef __AMX_BF16__

// By way of float, whose lower half is zero. Processors with AMX look up a byte of 128 in two cycles
// of one port, and a register of codes would take four look-ups. Emerald Rapids, 1 shared core,
// November 2026, 8 rows, 896 to 896 from L2: 47 us, and 80 by look-ups.
template <>
struct Decoded<EightBits, Bfloat16> {
  static constexpr int kWords = 2;
  U32x16 codes;

  SIMD_INLINE Decoded of(U32x16 w) { return {w}; }
  SIMD_INLINE U32x16 word(const Decoded& decoded, int i) {
    const U32x16 low = words_of(signed_byte(decoded.codes, 2 * i));
    const U32x16 high = words_of(signed_byte(decoded.codes, 2 * i + 1));
    return {_mm512_or_si512(shift_right(low, 16).v, high.v)};
  }
};

#else

template <>
struct Decoded<EightBits, Bfloat16> {
  static constexpr int kWords = 2;
  __m512i low, high;  // bytes

  SIMD_INLINE Decoded of(U32x16 w) {
    const __m512i magnitude = _mm512_abs_epi8(w.v);
    const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
    const __m512i high = _mm512_ternarylogic_epi32(look_up(kMagnitudes.high, magnitude), w.v, sign,
                                                   0xf8);  // high | (w & sign)
    // Of -128 the tables gave the magnitude 0, whose low byte is the same.
    const __mmask64 is_least = _mm512_cmpeq_epi8_mask(w.v, sign);
    return {look_up(kMagnitudes.low, magnitude),
            _mm512_mask_mov_epi8(high, is_least, _mm512_set1_epi8(static_cast<char>(0xc3)))};
  }

  SIMD_INLINE U32x16 word(const Decoded& decoded, int i) {
    const __m512i order = _mm512_load_si512(kPairOrders.bytes[i]);
    return {_mm512_permutex2var_epi8(decoded.low, order, decoded.high)};
  }

  SIMD_INLINE __m512i look_up(const uint8_t (&table)[128], __m512i index) {
    return _mm512_permutex2var_epi8(_mm512_load_si512(table), index,
                                    _mm512_load_si512(table + 64));
  }
};

#endif

// bfloat16 of -8 ... 7, twice, since vpermw looks at five bits of an index.
struct NibbleTable {
  alignas(64) uint16_t values[32];
};

static constexpr NibbleTable nibble_table() {
  NibbleTable table{};
  for (int i = 0; i < 32; ++i) {
    const int value = i % 16 - 8, m = value < 0 ? -value : value;
    const int bits = m == 0 ? 0 : kMagnitudes.high[m] << 8 | kMagnitudes.low[m];
    table.values[i] = static_cast<uint16_t>(value < 0 ? 0x8000 | bits : bits);
  }
  return table;
}

static constexpr NibbleTable kNibbles = nibble_table();

template <>
struct Decoded<FourBits, Bfloat16> {
  static constexpr int kWords = 4;
  U32x16 codes;

  SIMD_INLINE Decoded of(U32x16 w) { return {w}; }
  SIMD_INLINE U32x16 word(const Decoded& decoded, int i) {
    const __m512i table = _mm512_load_si512(kNibbles.values);
    return {_mm512_permutexvar_epi16(shift_right(decoded.codes, 4 * i).v, table)};
  }
};

#endif

}  // namespace lora_serve::LORA_SERVE_PATH
