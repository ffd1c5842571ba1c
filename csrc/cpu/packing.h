// Weights in the order in which the product reads them.
//
// weight (N out, K in) becomes panels of 16 outputs; a panel is K / kPerWord words of 16 lanes, and
// two panels lie side by side:
//
//   packed[pair][k][panel & 1][lane] = the word weight[16 panel + lane][kPerWord k ...]
//
// padded with zeros to whole panels and words. A last panel without a partner lies alone. The same
// on every path.
//
// In pairs, because the product takes two panels at once, and memory is read faster as one stream
// than as two: an LM head of 272 MB at 48 GB/s instead of 40 with one row, at 36 instead of 32 with
// eight (Zen 4, 2 cores, November 2026).

#pragma once

#include "dtype.h"
#include "workers.h"

namespace lora_serve {

static constexpr size_t words_along(size_t in_features, size_t bytes_per_element) {
  return ceil_div(in_features * bytes_per_element, 4);
}

static constexpr size_t packed_words(size_t out_features, size_t in_features,
                                     size_t bytes_per_element) {
  return round_up(out_features, kLanes) * words_along(in_features, bytes_per_element);
}

constexpr size_t kPair = 2;

// Where a panel lies: its word k starts at first + k * step.
struct PanelWords {
  const uint32_t* first;
  size_t step;
};

static inline PanelWords panel_words(const uint32_t* packed, size_t panel, size_t num_panels,
                                     size_t num_words) {
  const bool alone = panel % kPair == 0 && panel + 1 == num_panels;
  const uint32_t* pair = packed + panel / kPair * kPair * num_words * kLanes;
  return {pair + panel % kPair * kLanes, alone ? kLanes : kPair * kLanes};
}

// weight: rows of in_features elements, contiguous. packed: packed_words(...) words.
void pack_weight(const void* weight, size_t out_features, size_t in_features, Dtype dtype,
                 uint32_t* packed, Team team);

// The same for weights given row by row, where a null row is all zeros; whole panels only.
void pack_rows(const void* const* rows, size_t num_rows, size_t in_features, Dtype dtype,
               uint32_t* packed);

}  // namespace lora_serve
