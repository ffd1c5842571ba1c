// The blocks of GGUF's quantised types, taken apart into codes, scales and offsets, or into floats.
//
// lora_serve/models/checkpoints/ggml_blocks.py says what they hold; what is found here are the same
// bits, but for which NaN a NaN is.

#pragma once

#include <string>

#include "dtype.h"
#include "workers.h"

namespace lora_serve {

// Of num_blocks blocks with V values in groups of G: codes (V), scales (V / G), and offsets
// likewise, which may be null for types without. Codes are in the range of quantized_weight.h.
struct BlockCodes {
  int8_t* codes;
  float* scales;
  float* offsets;
};

// Throw std::invalid_argument for a type that is not known. type: such as "Q4_K".
void unpack_blocks(const std::string& type, const uint8_t* blocks, size_t num_blocks,
                   const BlockCodes& to, Team team);

// to: num_blocks V values of `dtype`, rounded to it from float.
void dequantize_blocks(const std::string& type, const uint8_t* blocks, size_t num_blocks,
                       Dtype dtype, void* to, Team team);

}  // namespace lora_serve
