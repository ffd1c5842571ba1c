// Sixteen 32-bit integers in the compiler's own vector type. Vocabulary: simd/integers_avx512.h.

#pragma once

#include "generic.h"

namespace lora_serve::LORA_SERVE_PATH {

struct I32x16 {
  IntLanes v;
};

SIMD_INLINE I32x16 broadcast_integer(int32_t x) { return {IntLanes{} + x}; }
SIMD_INLINE F32x16 to_float(I32x16 x) { return {__builtin_convertvector(x.v, FloatLanes)}; }

SIMD_INLINE U32x16 broadcast_word(const void* p) {
  uint32_t word;
  std::memcpy(&word, p, sizeof word);
  return {WordLanes{} + word};
}

SIMD_INLINE void store_words(uint32_t* p, U32x16 w) { std::memcpy(p, &w.v, sizeof w.v); }
SIMD_INLINE U32x16 xor_words(U32x16 w, uint32_t bits) { return {w.v ^ bits}; }
SIMD_INLINE U32x16 shift_right(U32x16 w, int n) { return {w.v >> static_cast<uint32_t>(n)}; }
SIMD_INLINE U32x16 words_of(F32x16 x) { return {reinterpret_cast<WordLanes>(x.v)}; }
SIMD_INLINE U32x16 select_bits(uint32_t mask, U32x16 a, U32x16 b) {
  return {(a.v & mask) | (b.v & ~mask)};
}
// With its highest bit set no byte borrows from the next.
SIMD_INLINE U32x16 centred_sixes(U32x16 w) {
  const U32x16 sixes = mask_words(w, 0x3f3f3f3fu);
  return {((sixes.v | 0x80808080u) - 0x20202020u) ^ 0x80808080u};
}

SIMD_INLINE IntLanes signed_byte_of(U32x16 w, int i) {
  return reinterpret_cast<IntLanes>(w.v << static_cast<uint32_t>(24 - 8 * i)) >> 24;
}
SIMD_INLINE F32x16 signed_byte(U32x16 w, int i) {
  return to_float(I32x16{signed_byte_of(w, i)});
}
SIMD_INLINE F32x16 centred_nibble(U32x16 w, int i) {
  return to_float(I32x16{reinterpret_cast<IntLanes>(mask_words(shift_right(w, 4 * i), 15).v) - 8});
}

SIMD_INLINE F32x16 centred_five(U32x16 w) {
  return to_float(I32x16{reinterpret_cast<IntLanes>(mask_words(w, 31).v) - 16});
}

constexpr int kBytesRaisedBy = 128;
SIMD_INLINE U32x16 raised_bytes(U32x16 w) { return xor_words(w, 0x80808080u); }

SIMD_INLINE I32x16 dot_bytes(U32x16 a, U32x16 b, I32x16 acc) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const U32x16 byte = mask_words(shift_right(a, 8 * i), 255);
    acc.v += reinterpret_cast<IntLanes>(byte.v) * signed_byte_of(b, i);
  }
  return acc;
}

SIMD_INLINE I32x16 dot_small_bytes(U32x16 a, U32x16 b, I32x16 acc) { return dot_bytes(a, b, acc); }

SIMD_INLINE F32x16 interleave_fours(F32x16 x) {
  constexpr int kOrder[8] = {0, 4, 1, 5, 2, 6, 3, 7};
  F32x16 y;
  SIMD_EACH_LANE y.v[i] = x.v[i / 8 * 8 + kOrder[i % 8]];
  return y;
}

SIMD_INLINE F32x16 load(const int8_t* p) {
  F32x16 y;
  SIMD_EACH_LANE y.v[i] = p[i];
  return y;
}
SIMD_INLINE void store_bytes(int8_t* p, F32x16 x) {
  SIMD_EACH_LANE p[i] = static_cast<int8_t>(x.v[i]);
}

}  // namespace lora_serve::LORA_SERVE_PATH
