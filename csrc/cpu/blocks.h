// Cutting a product of any size into register blocks, whose sizes the compiler must know.
//
// A block's sums do not depend on its size (product.h), so any cut gives the same bits.

#pragma once

#include "packing.h"
#include "parallel.h"
#include "product.h"

namespace lora_serve::LORA_SERVE_PATH {

// sums[r][16 v + lane] for kRows rows, `sums_stride` floats apart.
template <class Dot, int kRows, int kVectors, class Fetch>
static __attribute__((noinline)) void product_block(const typename Dot::Left* left,
                                                    size_t left_stride, RightView<kVectors> right,
                                                    size_t num_words, Fetch fetch, float* sums,
                                                    size_t sums_stride) {
  F32x16 acc[kRows][kVectors];
  clear(acc);
  multiply<Dot>(left, left_stride, right, num_words, fetch, acc);
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) store(sums + r * sums_stride + v * kLanes, acc[r][v]);
  }
}

template <int kValue>
struct Count {
  static constexpr int value = kValue;
};

// run(Count<n>()) for 1 <= n <= kMost.
template <int kMost, class Run>
SIMD_INLINE void with_count(size_t n, const Run& run) {
  if constexpr (kMost > 1) {
    if (n < kMost) return with_count<kMost - 1>(n, run);
  }
  run(Count<kMost>());
}

// Nearly equal blocks of at most `most`: 13 rows are 7 + 6, not 12 + 1. run(block).
template <class Run>
SIMD_INLINE void for_each_block(Range rows, size_t most, const Run& run) {
  const size_t num_blocks = ceil_div(rows.end - rows.begin, most);
  for (size_t i = 0; i < num_blocks; ++i) {
    const Range block = part_of(rows.end - rows.begin, num_blocks, i);
    run(Range{rows.begin + block.begin, rows.begin + block.end});
  }
}

// What a product of packed weights (packing.h) is made of.
template <class Dot>
struct PanelProduct {
  const typename Dot::Left* left;
  size_t left_stride;
  const uint32_t* packed;
  size_t num_panels;
  size_t num_words;  // along the summed dimension
};

template <int kVectors, class Dot>
SIMD_INLINE RightView<kVectors> view_of_panels(const PanelProduct<Dot>& product, size_t panel) {
  RightView<kVectors> right{};
  for (int v = 0; v < kVectors; ++v) {
    const PanelWords words =
        panel_words(product.packed, panel + v, product.num_panels, product.num_words);
    right.vectors[v] = words.first;
    right.step = words.step;
  }
  return right;
}

// Words that are asked for before they are due: 8 KiB of a pair of panels.
constexpr size_t kWordsAhead = 64;

// One block of rows finds its panel in memory, and asks for what it will need shortly. Several find
// it in a cache, and ask for the next one, each for its share.
template <int kVectors>
SIMD_INLINE FetchAhead ahead_of(RightView<kVectors> right, size_t num_words, size_t block,
                                size_t num_blocks) {
  const char* panel = reinterpret_cast<const char*>(right.vectors[0]);
  const size_t step = right.step * sizeof(uint32_t), bytes = num_words * step;
  if (num_blocks == 1) return {panel + kWordsAhead * step, step};
  return {panel + bytes + part_of(bytes, num_blocks, block).begin, ceil_div(step, num_blocks)};
}

// All rows times kVectors panels from `panel` on, at most kMost rows at once.
// finish(row, panel, sums) takes 16 sums.
template <int kVectors, int kMost, class Dot, class Finish>
static void product_of_panels(const PanelProduct<Dot>& product, Range rows, size_t panel,
                              const Finish& finish) {
  const RightView<kVectors> right = view_of_panels<kVectors>(product, panel);
  const size_t num_blocks = ceil_div(rows.end - rows.begin, kMost);
  size_t index = 0;
  for_each_block(rows, kMost, [&](Range block) {
    const FetchAhead fetch = ahead_of(right, product.num_words, index++, num_blocks);
    alignas(64) float sums[kMost][kVectors * kLanes];
    const size_t count = block.end - block.begin;
    with_count<kMost>(count, [&](auto num_rows) {
      product_block<Dot, decltype(num_rows)::value, kVectors>(
          product.left + block.begin * product.left_stride, product.left_stride, right,
          product.num_words, fetch, sums[0], kVectors * kLanes);
    });
    for (size_t r = 0; r < count; ++r) {
      for (int v = 0; v < kVectors; ++v) {
        finish(block.begin + r, panel + v, static_cast<const float*>(sums[r] + v * kLanes));
      }
    }
  });
}

// Part `index` of the panels cut into nearly equal ranges of whole pairs.
static inline Range part_of_panels(size_t num_panels, size_t num_parts, size_t index) {
  const Range pairs = part_of(ceil_div(num_panels, kPair), num_parts, index);
  const size_t end = pairs.end * kPair;
  return {pairs.begin * kPair, end < num_panels ? end : num_panels};
}

// So few rows leave registers for a pair of panels everywhere.
constexpr size_t kFewRows = 2;

// All rows times panels [first, last); first is even.
template <class Dot, class Finish>
static void product_of(const PanelProduct<Dot>& product, Range rows, Range panels,
                       const Finish& finish) {
  size_t panel = panels.begin;
  if (kMaxVectors < kPair && rows.end - rows.begin <= kFewRows) {
    for (; panel + kPair <= panels.end; panel += kPair) {
      product_of_panels<kPair, kFewRows>(product, rows, panel, finish);
    }
  }
  for (; panel + kMaxVectors <= panels.end; panel += kMaxVectors) {
    product_of_panels<kMaxVectors, kMaxRows>(product, rows, panel, finish);
  }
  for (; panel < panels.end; ++panel) {
    product_of_panels<1, kMaxRows>(product, rows, panel, finish);
  }
}

}  // namespace lora_serve::LORA_SERVE_PATH
