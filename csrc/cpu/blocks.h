// Cutting a product of any size into register blocks, whose sizes the compiler must know.
//
// A block's sums do not depend on its size (product.h), so any cut gives the same bits.

#pragma once

#include "parallel.h"
#include "product.h"

namespace lora_serve::LORA_SERVE_PATH {

template <int kValue>
struct Count {
  static constexpr int value = kValue;
};

// run(Count<n>()) for 1 <= n <= kMax.
template <int kMax, class Run>
SIMD_INLINE void with_count(size_t n, const Run& run) {
  if constexpr (kMax > 1) {
    if (n < kMax) return with_count<kMax - 1>(n, run);
  }
  run(Count<kMax>());
}

// Nearly equal blocks of at most kMax: 13 rows are 7 + 6, not 12 + 1.
template <int kMax, class Run>
SIMD_INLINE void for_each_block(size_t begin, size_t end, const Run& run) {
  const size_t num_blocks = ceil_div(end - begin, kMax);
  for (size_t i = 0; i < num_blocks; ++i) {
    const Range block = part_of(end - begin, num_blocks, i);
    with_count<kMax>(block.end - block.begin, [&](auto rows) { run(begin + block.begin, rows); });
  }
}

// finish(row, vector, sum) takes each sum of 16 columns.
template <class Dot, int kRows, int kVectors, class Finish>
static __attribute__((noinline)) void product_block(const typename Dot::Left* left,
                                                    size_t left_stride, RightView<kVectors> right,
                                                    size_t num_words, const Finish& finish) {
  F32x16 acc[kRows][kVectors];
  clear(acc);
  multiply<Dot>(left, left_stride, right, num_words, acc);
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) finish(r, v, acc[r][v]);
  }
}

// Few rows leave registers for more panels at once: several streams of weights hide the memory's
// latency, several chains of sums the multiplier's.
constexpr size_t kFewRows = 2;
constexpr int kVectorsOfFewRows = 2 * kMaxVectors;

// All rows [begin, end) times all panels [first, last) of packed weights (packing.h).
// finish(row, panel, sum).
template <class Dot, class Finish>
static void product_panels(const typename Dot::Left* left, size_t left_stride,
                           const uint32_t* packed, size_t num_words, Range rows, Range panels,
                           const Finish& finish) {
  const size_t panel_words = num_words * kLanes;
  const auto run = [&](size_t panel, auto vectors) {
    constexpr int kVectors = decltype(vectors)::value;
    constexpr int kRowsAtOnce = kVectors > kMaxVectors ? static_cast<int>(kFewRows) : kMaxRows;
    RightView<kVectors> right{{}, kLanes};
    for (int v = 0; v < kVectors; ++v) right.vectors[v] = packed + (panel + v) * panel_words;
    for_each_block<kRowsAtOnce>(rows.begin, rows.end, [&](size_t row, auto count) {
      product_block<Dot, decltype(count)::value, kVectors>(
          left + row * left_stride, left_stride, right, num_words,
          [&](int r, int v, F32x16 sum) { finish(row + r, panel + v, sum); });
    });
  };
  size_t panel = panels.begin;
  if (rows.end - rows.begin <= kFewRows) {
    for (; panel + kVectorsOfFewRows <= panels.end; panel += kVectorsOfFewRows) {
      run(panel, Count<kVectorsOfFewRows>());
    }
  }
  for (; panel + kMaxVectors <= panels.end; panel += kMaxVectors) run(panel, Count<kMaxVectors>());
  for (; panel < panels.end; ++panel) run(panel, Count<1>());
}

}  // namespace lora_serve::LORA_SERVE_PATH
