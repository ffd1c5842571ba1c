// Weights in the order in which the product reads them.
//
// weight (N out, K in) becomes panels of 16 outputs; a panel is K / kPerWord words of 16 lanes:
//
//   packed[panel][k][lane] = the word weight[16 panel + lane][kPerWord k ...]
//
// padded with zeros to whole panels and words. The same on every path.

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

// weight: rows of in_features elements, contiguous. packed: packed_words(...) words.
void pack_weight(const void* weight, size_t out_features, size_t in_features, Dtype dtype,
                 uint32_t* packed, Team team);

// The same for weights given row by row, where a null row is all zeros; whole panels only.
void pack_rows(const void* const* rows, size_t num_rows, size_t in_features, Dtype dtype,
               uint32_t* packed);

}  // namespace lora_serve
