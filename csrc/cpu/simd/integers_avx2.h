// Sixteen 32-bit integers in two AVX2 registers. Vocabulary: simd/integers_avx512.h.

#pragma once

#include "avx2.h"

namespace lora_serve::LORA_SERVE_PATH {

struct I32x16 {
  __m256i lo, hi;
};

SIMD_INLINE I32x16 broadcast_integer(int32_t x) {
  return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)};
}
SIMD_INLINE F32x16 to_float(I32x16 x) {
  return {_mm256_cvtepi32_ps(x.lo), _mm256_cvtepi32_ps(x.hi)};
}

SIMD_INLINE U32x16 broadcast_word(const void* p) {
  int word;
  std::memcpy(&word, p, sizeof word);
  return {_mm256_set1_epi32(word), _mm256_set1_epi32(word)};
}

SIMD_INLINE void store_words(uint32_t* p, U32x16 w) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), w.lo);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), w.hi);
}
SIMD_INLINE U32x16 xor_words(U32x16 w, uint32_t bits) {
  const __m256i b = _mm256_set1_epi32(static_cast<int>(bits));
  return {_mm256_xor_si256(w.lo, b), _mm256_xor_si256(w.hi, b)};
}
SIMD_INLINE U32x16 shift_right(U32x16 w, int n) {
  return {_mm256_srli_epi32(w.lo, n), _mm256_srli_epi32(w.hi, n)};
}
SIMD_INLINE U32x16 words_of(F32x16 x) {
  return {_mm256_castps_si256(x.lo), _mm256_castps_si256(x.hi)};
}
SIMD_INLINE __m256i select_bits(__m256i mask, __m256i a, __m256i b) {
  return _mm256_or_si256(_mm256_and_si256(mask, a), _mm256_andnot_si256(mask, b));
}
SIMD_INLINE U32x16 select_bits(uint32_t mask, U32x16 a, U32x16 b) {
  const __m256i m = _mm256_set1_epi32(static_cast<int>(mask));
  return {select_bits(m, a.lo, b.lo), select_bits(m, a.hi, b.hi)};
}
SIMD_INLINE U32x16 centred_sixes(U32x16 w) {
  const U32x16 sixes = mask_words(w, 0x3f3f3f3fu);
  const __m256i middle = _mm256_set1_epi8(32);
  return {_mm256_sub_epi8(sixes.lo, middle), _mm256_sub_epi8(sixes.hi, middle)};
}

SIMD_INLINE __m256 signed_byte(__m256i w, int i) {
  const __m256i top = _mm256_slli_epi32(w, 24 - 8 * i);
  return _mm256_cvtepi32_ps(_mm256_srai_epi32(top, 24));
}
SIMD_INLINE F32x16 signed_byte(U32x16 w, int i) {
  return {signed_byte(w.lo, i), signed_byte(w.hi, i)};
}
// With its highest bit flipped a nibble is the one that is 8 less, as a signed one; all of a word
// are flipped at once.
SIMD_INLINE __m256 signed_nibble(__m256i w, int i) {
  return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(w, 28 - 4 * i), 28));
}
SIMD_INLINE F32x16 centred_nibble(U32x16 w, int i) {
  const U32x16 flipped = xor_words(w, 0x88888888u);
  return {signed_nibble(flipped.lo, i), signed_nibble(flipped.hi, i)};
}

SIMD_INLINE __m256 centred_five(__m256i w) {
  const __m256i five = _mm256_and_si256(w, _mm256_set1_epi32(31));
  return _mm256_cvtepi32_ps(_mm256_sub_epi32(five, _mm256_set1_epi32(16)));
}
SIMD_INLINE F32x16 centred_five(U32x16 w) { return {centred_five(w.lo), centred_five(w.hi)}; }

// vpmaddubsw multiplies unsigned bytes by signed ones, and its sums of two saturate beyond 16 bits:
// those of magnitudes of at most 128 by 127 do not, nor those of small bytes.
constexpr int kBytesRaisedBy = 0;
SIMD_INLINE U32x16 raised_bytes(U32x16 w) { return w; }

SIMD_INLINE __m256i add_pairs(__m256i acc, __m256i pairs) {
  return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
SIMD_INLINE __m256i dot_bytes(__m256i a, __m256i b, __m256i acc) {
  return add_pairs(acc, _mm256_maddubs_epi16(_mm256_abs_epi8(a), _mm256_sign_epi8(b, a)));
}
SIMD_INLINE I32x16 dot_bytes(U32x16 a, U32x16 b, I32x16 acc) {
  return {dot_bytes(a.lo, b.lo, acc.lo), dot_bytes(a.hi, b.hi, acc.hi)};
}
SIMD_INLINE I32x16 dot_small_bytes(U32x16 a, U32x16 b, I32x16 acc) {
  return {add_pairs(acc.lo, _mm256_maddubs_epi16(a.lo, b.lo)),
          add_pairs(acc.hi, _mm256_maddubs_epi16(a.hi, b.hi))};
}

SIMD_INLINE F32x16 interleave_fours(F32x16 x) {
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  return {_mm256_permutevar8x32_ps(x.lo, order), _mm256_permutevar8x32_ps(x.hi, order)};
}

SIMD_INLINE F32x16 load(const int8_t* p) {
  const __m128i bytes = load_128(p);
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}
SIMD_INLINE void store_bytes(int8_t* p, F32x16 x) {
  const __m256i pairs = _mm256_packs_epi32(_mm256_cvtps_epi32(x.lo), _mm256_cvtps_epi32(x.hi));
  const __m256i ordered = _mm256_permute4x64_epi64(pairs, 0xd8);
  store_128(p, _mm_packs_epi16(_mm256_castsi256_si128(ordered),
                               _mm256_extracti128_si256(ordered, 1)));
}

}  // namespace lora_serve::LORA_SERVE_PATH
