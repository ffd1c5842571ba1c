// Turning words of codes (quantized_weight.h) into what a product multiplies.
//
// Every code is a whole number below 256, so it is exact in bfloat16, and float all the more.

#pragma once

#include "blocks.h"
#include "integers.h"

namespace lora_serve::LORA_SERVE_PATH {

// kPerUnit codes to a unit of kUnitWords words of 32 bits; value(unit, k) is one of them.
//
// Units of one word also become what dot takes: bytes(w, i) are four codes as bytes that are too
// large by kOffset each: those of k = 4 i ... in byte order.
struct EightBits {
  using Unit = U32x16;
  static constexpr int kPerUnit = 4, kUnitWords = 1, kOffset = kBytesRaisedBy;
  SIMD_INLINE Unit load(const uint32_t* at) { return load_words(at); }
  SIMD_INLINE U32x16 bytes(U32x16 w, int) { return raised_bytes(w); }
  SIMD_INLINE I32x16 dot(U32x16 bytes, U32x16 x, I32x16 acc) { return dot_bytes(bytes, x, acc); }
  SIMD_INLINE F32x16 in_byte_order(F32x16 x) { return x; }
  SIMD_INLINE F32x16 value(U32x16 w, int k) { return signed_byte(w, k); }
};

struct FourBits {
  using Unit = U32x16;
  static constexpr int kPerUnit = 8, kUnitWords = 1, kOffset = 8;
  SIMD_INLINE Unit load(const uint32_t* at) { return load_words(at); }
  SIMD_INLINE U32x16 bytes(U32x16 w, int i) {
    return mask_words(shift_right(w, 4 * i), 0x0f0f0f0fu);
  }
  SIMD_INLINE I32x16 dot(U32x16 bytes, U32x16 x, I32x16 acc) {
    return dot_small_bytes(bytes, x, acc);
  }
  SIMD_INLINE F32x16 in_byte_order(F32x16 x) { return interleave_fours(x); }
  SIMD_INLINE F32x16 value(U32x16 w, int k) { return centred_nibble(w, k % 2 * 4 + k / 2); }
};

// The byte where a code lies of four that are packed as neighbours, two to a half of a word.
static constexpr int byte_of(int k) { return k == 1 ? 2 : k == 2 ? 1 : k; }

// Four fours, of whose bytes the low six bits count.
struct SixBits {
  struct Unit {
    U32x16 fours[4];
  };
  static constexpr int kPerUnit = 16, kUnitWords = 3;

  SIMD_INLINE Unit load(const uint32_t* at) {
    const U32x16 a = load_words(at), b = load_words(at + kLanes), c = load_words(at + 2 * kLanes);
    const U32x16 low = select_bits(0x03030303u, shift_right(a, 6), shift_right(b, 4));
    return {{a, b, c, select_bits(0x0f0f0f0fu, low, shift_right(c, 2))}};
  }
  SIMD_INLINE F32x16 value(const Unit& unit, int k) {
    return signed_byte(centred_sixes(unit.fours[k / 4]), byte_of(k % 4));
  }
};

// Eight fours, of whose bytes the low five bits count.
struct FiveBits {
  struct Unit {
    U32x16 fours[8];
  };
  static constexpr int kPerUnit = 32, kUnitWords = 5;

  SIMD_INLINE Unit load(const uint32_t* at) {
    constexpr uint32_t kThree = 0x07070707u, kFour = 0x0f0f0f0fu;
    U32x16 w[kUnitWords];
#pragma GCC unroll 5
    for (int i = 0; i < kUnitWords; ++i) w[i] = load_words(at + i * kLanes);
    const U32x16 last = select_bits(kThree, shift_right(w[4], 5), shift_right(w[1], 4));
    return {{w[0], w[1], w[2], w[3], w[4],
             select_bits(kThree, shift_right(w[0], 5), shift_right(w[1], 2)),
             select_bits(kThree, shift_right(w[2], 5), shift_right(w[3], 2)),
             select_bits(kFour, last, shift_right(w[3], 3))}};
  }
  SIMD_INLINE F32x16 value(const Unit& unit, int k) {
    return centred_five(shift_right(unit.fours[k / 4], 8 * byte_of(k % 4)));
  }
};

// The words that a unit of codes becomes: kWords of them, ascending along k. Each is made when it
// is asked for, so that it need not wait in a register for its turn.
template <class Codes, class Word>
struct Decoded;

template <class Codes>
struct Decoded<Codes, float> {
  static constexpr int kWords = Codes::kPerUnit;
  typename Codes::Unit codes;

  SIMD_INLINE Decoded of(typename Codes::Unit unit) { return {unit}; }
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

// By way of float, whose lower half is zero. Processors with AMX look up a byte of 128 in two
// cycles of one port, and a register of codes would take four look-ups; conversions to float and
// shifts wait for the port of tiles. Emerald Rapids, 1 shared core, November 2026, 8 rows, 896 to
// 896 from L2: 42 us, 57 by conversions and shifts.
template <>
struct Decoded<EightBits, Bfloat16> {
  static constexpr int kWords = 2;
  U32x16 codes;

  SIMD_INLINE Decoded of(U32x16 w) { return {w}; }
  SIMD_INLINE U32x16 word(const Decoded& decoded, int i) {
    const __m512i low = exact(decoded.codes, 2 * i), high = exact(decoded.codes, 2 * i + 1);
    const __m512i upper_halves = _mm512_broadcast_i32x4(
        _mm_set_epi8(0, 0, 15, 14, 0, 0, 11, 10, 0, 0, 7, 6, 0, 0, 3, 2));
    constexpr __mmask64 kLowerHalves = 0x3333333333333333;
    return {_mm512_mask_shuffle_epi8(high, kLowerHalves, low, upper_halves)};
  }
  // The float of byte k: it is added to the bits of a float whose last place is 1.
  SIMD_INLINE __m512i exact(U32x16 w, int k) {
    constexpr float kOnes = 12582912;  // 3 * 2^22
    const __m512i raised = _mm512_dpbusd_epi32(_mm512_castps_si512(_mm512_set1_ps(kOnes)),
                                               _mm512_set1_epi32(1 << (8 * k)), w.v);
    return _mm512_castps_si512(_mm512_sub_ps(_mm512_castsi512_ps(raised), _mm512_set1_ps(kOnes)));
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

// bfloat16 of -n/2 ... n/2 - 1, again and again, since vpermw looks at five bits of an index.
struct SmallTable {
  alignas(64) uint16_t values[32];
};

static constexpr SmallTable small_table(int n) {
  SmallTable table{};
  for (int i = 0; i < 32; ++i) {
    const int value = i % n - n / 2, m = value < 0 ? -value : value;
    const int bits = m == 0 ? 0 : kMagnitudes.high[m] << 8 | kMagnitudes.low[m];
    table.values[i] = static_cast<uint16_t>(value < 0 ? 0x8000 | bits : bits);
  }
  return table;
}

static constexpr SmallTable kNibbles = small_table(16), kFives = small_table(32);

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

template <>
struct Decoded<FiveBits, Bfloat16> {
  static constexpr int kWords = 16;
  FiveBits::Unit codes;

  SIMD_INLINE Decoded of(const FiveBits::Unit& unit) { return {unit}; }
  SIMD_INLINE U32x16 word(const Decoded& decoded, int i) {
    const __m512i table = _mm512_load_si512(kFives.values);
    const U32x16 four = decoded.codes.fours[i / 2];
    const U32x16 pair = i % 2 == 0 ? four : shift_right(four, 8);
    return {_mm512_permutexvar_epi16(pair.v, table)};
  }
};

// bfloat16 of -32 ... 31, as its high and its low byte.
struct SixTables {
  alignas(64) uint8_t high[64], low[64];
};

static constexpr SixTables six_tables() {
  SixTables tables{};
  for (int i = 0; i < 64; ++i) {
    const int value = i - 32, m = value < 0 ? -value : value;
    tables.high[i] = static_cast<uint8_t>(kMagnitudes.high[m] | (value < 0 ? 0x80 : 0));
    tables.low[i] = kMagnitudes.low[m];
  }
  return tables;
}

static constexpr SixTables kSixes = six_tables();

// vpermb looks at six bits of an index: all bytes of a four at once, and then each pair's.
template <>
struct Decoded<SixBits, Bfloat16> {
  static constexpr int kWords = 8;
  U32x16 high[4], low[4];

  SIMD_INLINE Decoded of(const SixBits::Unit& unit) {
    const __m512i highs = _mm512_load_si512(kSixes.high), lows = _mm512_load_si512(kSixes.low);
    Decoded decoded;
#pragma GCC unroll 4
    for (int f = 0; f < 4; ++f) {
      decoded.high[f] = {_mm512_permutexvar_epi8(unit.fours[f].v, highs)};
      decoded.low[f] = {_mm512_permutexvar_epi8(unit.fours[f].v, lows)};
    }
    return decoded;
  }
  SIMD_INLINE U32x16 word(const Decoded& decoded, int i) {
    constexpr uint32_t kLowBytes = 0x00ff00ffu;
    const U32x16 high = decoded.high[i / 2], low = decoded.low[i / 2];
    if (i % 2 == 1) return select_bits(kLowBytes, shift_right(low, 8), high);
    return select_bits(kLowBytes, low, {_mm512_slli_epi32(high.v, 8)});
  }
};

#endif

}  // namespace lora_serve::LORA_SERVE_PATH
