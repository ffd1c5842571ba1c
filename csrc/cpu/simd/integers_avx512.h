// Sixteen 32-bit integers in one AVX-512 register, and the bytes of words as numbers.
//
// Shared vocabulary of all simd/integers_*.h files: what quantised products need beyond floats.

#pragma once

#include "avx512.h"

namespace lora_serve::LORA_SERVE_PATH {

// Not __m512i, whose lanes are of 64 bits: GCC 12 would copy, and spill, every sum that it passes
// between the two types.
typedef int32_t IntLanes __attribute__((vector_size(4 * kLanes)));

struct I32x16 {
  IntLanes v;
};

SIMD_INLINE I32x16 broadcast_integer(int32_t x) { return {IntLanes{} + x}; }
SIMD_INLINE F32x16 to_float(I32x16 x) { return {_mm512_cvtepi32_ps((__m512i)x.v)}; }

// The word at p in every lane.
SIMD_INLINE U32x16 broadcast_word(const void* p) {
  int word;
  std::memcpy(&word, p, sizeof word);
  return {_mm512_set1_epi32(word)};
}

SIMD_INLINE void store_words(uint32_t* p, U32x16 w) { _mm512_storeu_si512(p, w.v); }
SIMD_INLINE U32x16 xor_words(U32x16 w, uint32_t bits) {
  return {_mm512_xor_si512(w.v, _mm512_set1_epi32(static_cast<int>(bits)))};
}
SIMD_INLINE U32x16 shift_right(U32x16 w, int n) {
  return {_mm512_srli_epi32(w.v, static_cast<unsigned>(n))};
}
SIMD_INLINE U32x16 words_of(F32x16 x) { return {_mm512_castps_si512(x.v)}; }
// Bits of a where the mask has them, of b elsewhere.
SIMD_INLINE U32x16 select_bits(uint32_t mask, U32x16 a, U32x16 b) {
  const __m512i m = _mm512_set1_epi32(static_cast<int>(mask));
  return {_mm512_ternarylogic_epi32(m, a.v, b.v, 0xca)};
}
// The low six bits of each byte, less 32.
SIMD_INLINE U32x16 centred_sixes(U32x16 w) {
  const U32x16 sixes = mask_words(w, 0x3f3f3f3fu);
  return {_mm512_sub_epi8(sixes.v, _mm512_set1_epi8(32))};
}

// Byte i of every word, with its sign.
SIMD_INLINE F32x16 signed_byte(U32x16 w, int i) {
#ifdef __AVX512VNNI__
  // One instruction of two ports, where shifts are two of one.
  const __m512i chosen = _mm512_set1_epi32(1 << (8 * i));
  return {_mm512_cvtepi32_ps(_mm512_dpbusd_epi32(_mm512_setzero_si512(), chosen, w.v))};
#else
  const __m512i top = _mm512_slli_epi32(w.v, static_cast<unsigned>(24 - 8 * i));
  return {_mm512_cvtepi32_ps(_mm512_srai_epi32(top, 24))};
#endif
}
// Nibble i of every word, less 8.
SIMD_INLINE F32x16 centred_nibble(U32x16 w, int i) {
  const __m512 values = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
  return {_mm512_permutexvar_ps(shift_right(w, 4 * i).v, values)};
}

// The low five bits of every word, less 16.
SIMD_INLINE F32x16 centred_five(U32x16 w) {
  const __m512 low = _mm512_setr_ps(-16, -15, -14, -13, -12, -11, -10, -9, -8, -7, -6, -5, -4, -3,
                                    -2, -1);
  const __m512 high = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return {_mm512_permutex2var_ps(low, w.v, high)};
}

// What dot_bytes takes in the place of signed bytes: larger by so much, and unsigned then.
constexpr int kBytesRaisedBy = 128;
SIMD_INLINE U32x16 raised_bytes(U32x16 w) { return xor_words(w, 0x80808080u); }

// acc + the sum over four bytes of a, as raised_bytes gives it, * b in [-127, 127], exactly.
SIMD_INLINE I32x16 dot_bytes(U32x16 a, U32x16 b, I32x16 acc) {
#ifdef __AVX512VNNI__
  return {(IntLanes)_mm512_dpbusd_epi32((__m512i)acc.v, a.v, b.v)};
#else
  const __m512i a_even = _mm512_and_si512(a.v, _mm512_set1_epi16(0xff));
  const __m512i a_odd = _mm512_srli_epi16(a.v, 8);
  const __m512i b_even = _mm512_srai_epi16(_mm512_slli_epi16(b.v, 8), 8);
  const __m512i b_odd = _mm512_srai_epi16(b.v, 8);
  const __m512i even = _mm512_madd_epi16(a_even, b_even), odd = _mm512_madd_epi16(a_odd, b_odd);
  return {acc.v + (IntLanes)_mm512_add_epi32(even, odd)};
#endif
}

// The same of unsigned bytes below 16 that are not raised.
SIMD_INLINE I32x16 dot_small_bytes(U32x16 a, U32x16 b, I32x16 acc) { return dot_bytes(a, b, acc); }

// Lanes 0, 4, 1, 5, 2, 6, 3, 7 of each half.
SIMD_INLINE F32x16 interleave_fours(F32x16 x) {
  const __m512i order = _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
  return {_mm512_permutexvar_ps(order, x.v)};
}

SIMD_INLINE F32x16 load(const int8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))};
}
// Whole numbers in [-127, 127] as 16 bytes.
SIMD_INLINE void store_bytes(int8_t* p, F32x16 x) {
  const __m128i bytes = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x.v));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}

}  // namespace lora_serve::LORA_SERVE_PATH
