// Products by widening with the halves of a word in either order, for seeing that tests of equal
// bits notice the wrong one.

#pragma once

#include <cstddef>
#include <cstdint>

#include "dtype.h"

namespace lora_serve::tests {

enum class Halves { kUpperFirst, kLowerFirst };

// Whether this build's products by widening are fused, as those of every path but "scalar" are.
bool widens_with_fma();

constexpr size_t kMostInFeatures = 512;

// y[t][n] = sum over k of x[t][k] * weight[n][k], rounded once; types of 16 bits only. x and y are
// contiguous, packed is from pack_weight, in_features is even, out_features a multiple of 32.
void widened_product(Halves order, Dtype dtype, const void* x, const uint32_t* packed, size_t rows,
                     size_t in_features, size_t out_features, void* y);

}  // namespace lora_serve::tests
