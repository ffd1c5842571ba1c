// The one inner loop: acc[r][v] += sum over k of left[r][k] * right[k][16 v .. 16 v + 15].
//
// R rows, V vectors of 16 columns, K words along the summed dimension, all in one pass and in one
// accumulator: an element's sum goes over the words in ascending order whatever R and V are, and
// whether it is interrupted between calls. Linear layers, LoRA, and both products of attention are
// this loop.
//
// Inside a word the upper element comes first, because vdpbf16ps does so: every path with a fused
// multiply-add then gives the same bits, save that vdpbf16ps takes denormals, below 2^-126, as
// zero, and that AMX sums bfloat16 in an order of its own (tiles.h).
//
// left: rows of `Left` elements, kPerWord<T> per word. right: words of T, see dtype.h.

#pragma once

#include <type_traits>

#include "dtype.h"

namespace lora_serve::LORA_SERVE_PATH {

// Widens both sides and multiplies with one fma per element.
template <class T>
struct WidenedDot {
  using Left = float;
  using Word = T;
  static constexpr int kSteps = kPerWord<T>;
  using Right = F32x16;
  using LeftVector = F32x16;

  SIMD_INLINE Right right(U32x16 words, int step) { return Widen<T>::element(words, step); }
  SIMD_INLINE LeftVector left(const Left* word, int step) { return broadcast(word[step]); }
  SIMD_INLINE F32x16 multiply_add(LeftVector a, Right b, F32x16 acc) { return fma(a, b, acc); }
};

#ifdef __AVX512BF16__

// vdpbf16ps: acc + a1 * b1, then + a0 * b0, each a fused multiply-add that takes denormals as zero.
struct Bfloat16PairDot {
  using Left = Bfloat16;
  using Word = Bfloat16;
  static constexpr int kSteps = 1;
  using Right = __m512i;
  using LeftVector = __m512i;

  SIMD_INLINE Right right(U32x16 words, int) { return words.v; }
  SIMD_INLINE LeftVector left(const Left* word, int) {
    int pair;
    std::memcpy(&pair, word, sizeof pair);
    return _mm512_set1_epi32(pair);
  }
  SIMD_INLINE F32x16 multiply_add(LeftVector a, Right b, F32x16 acc) {
    return {_mm512_dpbf16_ps(acc.v, (__m512bh)a, (__m512bh)b)};
  }
};

#endif

// How this path multiplies activations of type T with words of type T.
template <class T>
struct DotFor {
  using Type = WidenedDot<T>;
};

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
template <>
struct DotFor<Bfloat16> {
  using Type = Bfloat16PairDot;
};
#endif

// Whether a dot multiplies whole tiles (tiles.h), not word by word.
template <class Dot>
constexpr bool kInTiles = false;

// Stores a left side that was computed in float. A bf16 product has a bf16 left side on every path,
// also where the path holds it in float.
template <class Dot>
SIMD_INLINE void store_left(typename Dot::Left* to, F32x16 x) {
  using Word = typename Dot::Word;
  if constexpr (std::is_same_v<Word, Bfloat16> && !std::is_same_v<typename Dot::Left, Word>) {
    Word rounded[kLanes];
    store(rounded, x);
    x = load(static_cast<const Word*>(rounded));
  }
  store(to, x);
}

// For sanitizers: every kind of block, of fewer sizes, and the same bits.
#ifdef LORA_SERVE_SMALL_BUILD
constexpr bool kIsSmallBuild = true;
#else
constexpr bool kIsSmallBuild = false;
#endif

// Register blocks, chosen so that accumulators, right vectors and one broadcast fill the register
// file: 24 + 2 of 32 (AVX-512), 12 + 2 of 16 (AVX2, two to a vector).
#ifdef __AVX512F__
constexpr int kMaxRows = kIsSmallBuild ? 3 : 12;
constexpr int kMaxVectors = 2;
#else
constexpr int kMaxRows = kIsSmallBuild ? 3 : 6;
constexpr int kMaxVectors = 1;
#endif

// Where the vectors of the right side lie: vector v of word k starts at vectors[v] + k * step.
template <int kVectors>
struct RightView {
  const uint32_t* vectors[kVectors];
  size_t step;
};

// acc += the products of one word of each row, whose first lies at `left`.
template <class Dot, int kRows, int kVectors>
SIMD_INLINE void multiply_word(const typename Dot::Left* left, size_t left_stride,
                               const U32x16 (&words)[kVectors], F32x16 (&acc)[kRows][kVectors]) {
#pragma GCC unroll 2
  for (int i = 0; i < Dot::kSteps; ++i) {
    const int step = Dot::kSteps - 1 - i;
    typename Dot::Right b[kVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) b[v] = Dot::right(words[v], step);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const auto a = Dot::left(left + r * left_stride, step);
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) acc[r][v] = Dot::multiply_add(a, b[v], acc[r][v]);
    }
  }
}

// What a product asks memory for while it multiplies: two cache lines with each word, `step` bytes
// further each time. It may lie behind the end of what there is.
struct FetchAhead {
  const char* lines;
  size_t step;

  void next() {
    __builtin_prefetch(lines);
    __builtin_prefetch(lines + 64);
    lines += step;
  }
};

// For a right side that lies in a cache.
struct FetchNothing {
  void next() {}
};

template <class Dot, int kRows, int kVectors, class Fetch>
SIMD_INLINE void multiply(const typename Dot::Left* left, size_t left_stride,
                          RightView<kVectors> right, size_t num_words, Fetch fetch,
                          F32x16 (&acc)[kRows][kVectors]) {
  for (size_t k = 0; k < num_words; ++k) {
    U32x16 words[kVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) words[v] = load_words(right.vectors[v] + k * right.step);
    fetch.next();
    multiply_word<Dot>(left + k * kPerWord<typename Dot::Word>, left_stride, words, acc);
  }
}

template <int kRows, int kVectors>
SIMD_INLINE void clear(F32x16 (&acc)[kRows][kVectors]) {
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) acc[r][v] = zero();
  }
}

}  // namespace lora_serve::LORA_SERVE_PATH
