// Groups of decoded codes times rows, by AMX, each group in the order of sums of tiles.h.
//
// Some groups are multiplied one after the other before they are scaled and added: none waits for
// the tiles of the one before.

#pragma once

#include "quantized_product.h"
#include "tiles.h"

#ifdef __AMX_BF16__

namespace lora_serve::LORA_SERVE_PATH {

constexpr size_t kMostGroupsAtOnce = 8;

// Decoded words of these groups that lie in L1: 16 KiB of two panels.
constexpr size_t kDecodedWordsAtOnce = 128;

template <>
constexpr size_t kRowsAtOnce<Bfloat16Tiles> = kRowsOfTile;

template <class Codes>
SIMD_INLINE size_t groups_at_once(const QuantizedProduct<Bfloat16Tiles>& product) {
  const size_t words = product.weight.shape.group / kPerWord<Bfloat16>;
  const size_t fit = words < kDecodedWordsAtOnce ? kDecodedWordsAtOnce / words : 1;
  return fit < kMostGroupsAtOnce ? fit : kMostGroupsAtOnce;
}

// sums (rows, kVectors, 16) += scale and offset of group g times its `products`.
template <int kVectors>
SIMD_INLINE void add_group(const CodeView<kVectors>& view, size_t g, const RowSums& rows,
                           size_t num_rows, const float* products, float* sums) {
  for (int v = 0; v < kVectors; ++v) {
    const F32x16 scale = view.scale(v, g);
    for (size_t r = 0; r < num_rows; ++r) {
      const size_t at = (r * kVectors + v) * kLanes;
      store(sums + at, fma(scale, load(products + at), load(sums + at)));
    }
    if (rows.data == nullptr) continue;
    const F32x16 offset = view.offset(v, g);
    for (size_t r = 0; r < num_rows; ++r) {
      float* sum = sums + (r * kVectors + v) * kLanes;
      store(sum, fma(offset, rows.of(r, g), load(sum)));
    }
  }
}

// At most 16 rows times at most kMostGroupsAtOnce groups, whose words lie at `decoded`.
template <class Codes, int kVectors>
static void multiply_groups(const QuantizedProduct<Bfloat16Tiles>& product, Range block,
                            Range groups, const uint32_t* decoded,
                            const CodeView<kVectors>& view, float* sums) {
  constexpr size_t kWords = Decoded<Codes, Bfloat16>::kWords;
  const size_t num_rows = block.end - block.begin;
  const size_t stride = product.left.stride * sizeof(Bfloat16);
  const Bfloat16* left = product.left.data + block.begin * product.left.stride;
  alignas(64) float products[kMostGroupsAtOnce][kRowsOfTile * kVectors * kLanes];
  configure_tiles(num_rows);
  for (size_t g = groups.begin; g < groups.end; ++g) {
    const Range words = words_of_group<Codes>(product.weight.shape, g);
    const size_t num_words = (words.end - words.begin) * kWords;
    RightView<kVectors> right{{}, kVectors * kLanes};
    for (int v = 0; v < kVectors; ++v) right.vectors[v] = decoded + v * kLanes;
    clear_tiles<kVectors>();
    multiply_tiles<kVectors>({left + words.begin * Codes::kPerWord, stride}, num_rows, right,
                             num_words, FetchNothing{});
    store_sums<kVectors>(products[g - groups.begin], kVectors * kLanes);
    decoded += num_words * kVectors * kLanes;
  }
  for (size_t g = groups.begin; g < groups.end; ++g) {
    add_group(view, g, product.sums.from(block.begin), num_rows, products[g - groups.begin], sums);
  }
}

}  // namespace lora_serve::LORA_SERVE_PATH

#endif
