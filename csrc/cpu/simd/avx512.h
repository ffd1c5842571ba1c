// Sixteen float lanes in one AVX-512 register; bf16 rounding by instruction where it exists.
//
// Shared vocabulary of all simd/*.h files. Lanes never mix except in reduce_add and reduce_max,
// whose order is the same tree (8, 4, 2, 1 apart) on every path. No operation contracts by itself:
// what is fused is written fma.

#pragma once

#include <immintrin.h>

#include <cstring>

#include "../dtype.h"

namespace lora_serve::LORA_SERVE_PATH {

struct F32x16 {
  __m512 v;
};

struct U32x16 {
  __m512i v;
};

SIMD_INLINE F32x16 broadcast(float x) { return {_mm512_set1_ps(x)}; }
SIMD_INLINE F32x16 zero() { return {_mm512_setzero_ps()}; }
SIMD_INLINE F32x16 add(F32x16 a, F32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
SIMD_INLINE F32x16 sub(F32x16 a, F32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
SIMD_INLINE F32x16 mul(F32x16 a, F32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
SIMD_INLINE F32x16 div(F32x16 a, F32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
// a * b + c, rounded once.
SIMD_INLINE F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// A NaN in x comes through; bound is a number.
SIMD_INLINE F32x16 at_least(F32x16 x, F32x16 bound) { return {_mm512_max_ps(bound.v, x.v)}; }
SIMD_INLINE F32x16 at_most(F32x16 x, F32x16 bound) { return {_mm512_min_ps(bound.v, x.v)}; }
SIMD_INLINE F32x16 round_to_integer(F32x16 x) {
  return {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// x * 2^n for integral n, rounded once.
SIMD_INLINE F32x16 scale_by_power(F32x16 x, F32x16 n) { return {_mm512_scalef_ps(x.v, n.v)}; }

SIMD_INLINE float reduce_add(F32x16 x) {
  __m256 a = _mm256_add_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}

SIMD_INLINE float reduce_max(F32x16 x) {
  __m256 a = _mm256_max_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
  __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}

// Lanes [begin, end) of x, `fill` elsewhere.
SIMD_INLINE F32x16 keep_lanes(F32x16 x, int begin, int end, float fill) {
  const __mmask16 keep = static_cast<__mmask16>(((1u << end) - 1) & ~((1u << begin) - 1));
  return {_mm512_mask_blend_ps(keep, _mm512_set1_ps(fill), x.v)};
}

SIMD_INLINE __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1); }

SIMD_INLINE U32x16 load_words(const uint32_t* p) { return {_mm512_loadu_si512(p)}; }
SIMD_INLINE U32x16 mask_words(U32x16 w, uint32_t mask) {
  return {_mm512_and_si512(w.v, _mm512_set1_epi32(static_cast<int>(mask)))};
}

// Element e of every word, widened: e = 0 is the low half. One element for float.
template <class T>
struct Widen;

template <>
struct Widen<float> {
  SIMD_INLINE F32x16 element(U32x16 w, int) { return {_mm512_castsi512_ps(w.v)}; }
};

template <>
struct Widen<Bfloat16> {
  SIMD_INLINE F32x16 element(U32x16 w, int e) {
    const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    return {_mm512_castsi512_ps(e == 0 ? _mm512_slli_epi32(w.v, 16) : _mm512_and_si512(w.v, high))};
  }
};

template <>
struct Widen<Float16> {
  SIMD_INLINE F32x16 element(U32x16 w, int e) {
    return {_mm512_cvtph_ps(_mm512_cvtepi32_epi16(e == 0 ? w.v : _mm512_srli_epi32(w.v, 16)))};
  }
};

SIMD_INLINE __m256i round_to_bfloat16(__m512 x) {
#ifdef __AVX512BF16__
  return (__m256i)_mm512_cvtneps_pbh(x);
#else
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
#endif
}

SIMD_INLINE F32x16 from_bfloat16(__m256i bits) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
}

// Rows: load and load_first widen to float; store and store_first round to nearest even.
// The _first forms touch n elements only, n <= 16; lanes from n on read as zero.

SIMD_INLINE F32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
SIMD_INLINE F32x16 load_first(const float* p, int n) {
  show_to_sanitizer(p, n);
  return {_mm512_maskz_loadu_ps(first_lanes(n), p)};
}
SIMD_INLINE void store(float* p, F32x16 x) { _mm512_storeu_ps(p, x.v); }
SIMD_INLINE void store_first(float* p, F32x16 x, int n) {
  show_to_sanitizer(p, n);
  _mm512_mask_storeu_ps(p, first_lanes(n), x.v);
}

SIMD_INLINE F32x16 load(const Bfloat16* p) {
  return from_bfloat16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
SIMD_INLINE F32x16 load_first(const Bfloat16* p, int n) {
  show_to_sanitizer(p, n);
  return from_bfloat16(_mm256_maskz_loadu_epi16(first_lanes(n), p));
}
SIMD_INLINE void store(Bfloat16* p, F32x16 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), round_to_bfloat16(x.v));
}
SIMD_INLINE void store_first(Bfloat16* p, F32x16 x, int n) {
  show_to_sanitizer(p, n);
  _mm256_mask_storeu_epi16(p, first_lanes(n), round_to_bfloat16(x.v));
}

SIMD_INLINE F32x16 load(const Float16* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
SIMD_INLINE F32x16 load_first(const Float16* p, int n) {
  show_to_sanitizer(p, n);
  return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(n), p))};
}
SIMD_INLINE void store(Float16* p, F32x16 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT));
}
SIMD_INLINE void store_first(Float16* p, F32x16 x, int n) {
  show_to_sanitizer(p, n);
  _mm256_mask_storeu_epi16(p, first_lanes(n), _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT));
}

}  // namespace lora_serve::LORA_SERVE_PATH
