// Sixteen float lanes in two AVX2 registers; needs FMA and F16C too. Vocabulary: simd/avx512.h.

#pragma once

#include <immintrin.h>

#include <cstring>

#include "../dtype.h"

namespace lora_serve::LORA_SERVE_PATH {

struct F32x16 {
  __m256 lo, hi;
};

struct U32x16 {
  __m256i lo, hi;
};

SIMD_INLINE F32x16 broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
SIMD_INLINE F32x16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
SIMD_INLINE F32x16 add(F32x16 a, F32x16 b) {
  return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}
SIMD_INLINE F32x16 sub(F32x16 a, F32x16 b) {
  return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}
SIMD_INLINE F32x16 mul(F32x16 a, F32x16 b) {
  return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}
SIMD_INLINE F32x16 div(F32x16 a, F32x16 b) {
  return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}
SIMD_INLINE F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
SIMD_INLINE F32x16 at_least(F32x16 x, F32x16 bound) {
  return {_mm256_max_ps(bound.lo, x.lo), _mm256_max_ps(bound.hi, x.hi)};
}
SIMD_INLINE F32x16 at_most(F32x16 x, F32x16 bound) {
  return {_mm256_min_ps(bound.lo, x.lo), _mm256_min_ps(bound.hi, x.hi)};
}
SIMD_INLINE F32x16 round_to_integer(F32x16 x) {
  constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.lo, kMode), _mm256_round_ps(x.hi, kMode)};
}

SIMD_INLINE __m256 power_of_two(__m256i n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
// In two factors, so that n may leave the exponent's range and denormals come out right.
SIMD_INLINE __m256 scale_by_power(__m256 x, __m256 power) {
  const __m256i n = _mm256_cvtps_epi32(power);
  const __m256i half = _mm256_srai_epi32(n, 1);
  x = _mm256_mul_ps(x, power_of_two(half));
  return _mm256_mul_ps(x, power_of_two(_mm256_sub_epi32(n, half)));
}
SIMD_INLINE F32x16 scale_by_power(F32x16 x, F32x16 n) {
  return {scale_by_power(x.lo, n.lo), scale_by_power(x.hi, n.hi)};
}

SIMD_INLINE float reduce_add(F32x16 x) {
  __m256 a = _mm256_add_ps(x.lo, x.hi);
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}

SIMD_INLINE float reduce_max(F32x16 x) {
  __m256 a = _mm256_max_ps(x.lo, x.hi);
  __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}

SIMD_INLINE __m256 keep_lanes(__m256 x, __m256i lane, int begin, int end, __m256 fill) {
  const __m256i from = _mm256_cmpgt_epi32(lane, _mm256_set1_epi32(begin - 1));
  const __m256i to = _mm256_cmpgt_epi32(_mm256_set1_epi32(end), lane);
  return _mm256_blendv_ps(fill, x, _mm256_castsi256_ps(_mm256_and_si256(from, to)));
}
SIMD_INLINE F32x16 keep_lanes(F32x16 x, int begin, int end, float fill) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256 f = _mm256_set1_ps(fill);
  return {keep_lanes(x.lo, lane, begin, end, f), keep_lanes(x.hi, lane, begin - 8, end - 8, f)};
}

SIMD_INLINE __m256i load_256(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}

SIMD_INLINE U32x16 load_words(const uint32_t* p) { return {load_256(p), load_256(p + 8)}; }
SIMD_INLINE U32x16 mask_words(U32x16 w, uint32_t mask) {
  const __m256i m = _mm256_set1_epi32(static_cast<int>(mask));
  return {_mm256_and_si256(w.lo, m), _mm256_and_si256(w.hi, m)};
}

template <class T>
struct Widen;

template <>
struct Widen<float> {
  SIMD_INLINE F32x16 element(U32x16 w, int) {
    return {_mm256_castsi256_ps(w.lo), _mm256_castsi256_ps(w.hi)};
  }
};

template <>
struct Widen<Bfloat16> {
  SIMD_INLINE __m256 half(__m256i w, int e) {
    const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    return _mm256_castsi256_ps(e == 0 ? _mm256_slli_epi32(w, 16) : _mm256_and_si256(w, high));
  }
  SIMD_INLINE F32x16 element(U32x16 w, int e) { return {half(w.lo, e), half(w.hi, e)}; }
};

// The low 16 bits of each 32-bit lane, packed in order.
SIMD_INLINE __m128i low_halves(__m256i w) {
  const __m256i low = _mm256_and_si256(w, _mm256_set1_epi32(0xffff));
  return _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
}

template <>
struct Widen<Float16> {
  SIMD_INLINE __m256 half(__m256i w, int e) {
    return _mm256_cvtph_ps(low_halves(e == 0 ? w : _mm256_srli_epi32(w, 16)));
  }
  SIMD_INLINE F32x16 element(U32x16 w, int e) { return {half(w.lo, e), half(w.hi, e)}; }
};

SIMD_INLINE __m128i load_128(const void* p) {
  return _mm_loadu_si128(static_cast<const __m128i*>(p));
}
SIMD_INLINE void store_128(void* p, __m128i x) { _mm_storeu_si128(static_cast<__m128i*>(p), x); }

SIMD_INLINE F32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
SIMD_INLINE void store(float* p, F32x16 x) {
  _mm256_storeu_ps(p, x.lo);
  _mm256_storeu_ps(p + 8, x.hi);
}

SIMD_INLINE __m256 widen_bfloat16(__m128i bits) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
SIMD_INLINE F32x16 load(const Bfloat16* p) {
  return {widen_bfloat16(load_128(p)), widen_bfloat16(load_128(p + 8))};
}
SIMD_INLINE __m128i round_to_bfloat16(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return low_halves(_mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16));
}
SIMD_INLINE void store(Bfloat16* p, F32x16 x) {
  store_128(p, round_to_bfloat16(x.lo));
  store_128(p + 8, round_to_bfloat16(x.hi));
}

SIMD_INLINE F32x16 load(const Float16* p) {
  return {_mm256_cvtph_ps(load_128(p)), _mm256_cvtph_ps(load_128(p + 8))};
}
SIMD_INLINE void store(Float16* p, F32x16 x) {
  store_128(p, _mm256_cvtps_ph(x.lo, _MM_FROUND_TO_NEAREST_INT));
  store_128(p + 8, _mm256_cvtps_ph(x.hi, _MM_FROUND_TO_NEAREST_INT));
}

template <class T>
SIMD_INLINE F32x16 load_first(const T* p, int n) {
  T row[kLanes] = {};
  std::memcpy(row, p, static_cast<size_t>(n) * sizeof(T));
  return load(row);
}

template <class T>
SIMD_INLINE void store_first(T* p, F32x16 x, int n) {
  T row[kLanes];
  store(row, x);
  std::memcpy(p, row, static_cast<size_t>(n) * sizeof(T));
}

}  // namespace lora_serve::LORA_SERVE_PATH
